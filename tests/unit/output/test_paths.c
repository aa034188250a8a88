// SPDX-License-Identifier: Apache-2.0
/// Paths whose links are resolved once.
#include <linux/limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "fixture.h"
#include "output/output.h"

/// Enters a new folder with the folders "a" and "b" and the link "now" to "a".
static void enter_folder(void) {
    char name[] = "/tmp/test_paths_XXXXXX";
    if (mkdtemp(name) == NULL || chdir(name) != 0 || mkdir("a", 0700) != 0 ||
        mkdir("b", 0700) != 0 || symlink("a", "now") != 0)
        abort();
}

static void leave_folder(void) {
    char name[PATH_MAX];
    if (getcwd(name, sizeof name) == NULL || unlink("now") != 0 || rmdir("a") != 0 ||
        rmdir("b") != 0 || chdir("/") != 0 || rmdir(name) != 0)
        abort();
}

static bool is_same_folder(const char *one, const char *other) {
    struct stat first, second;
    return stat(one, &first) == 0 && stat(other, &second) == 0 && first.st_dev == second.st_dev &&
           first.st_ino == second.st_ino;
}

/// A path inside a folder goes where the folder's link led, however the two are spelled. Other
/// paths follow the links of the moment.
TEST(a_path_inside_a_settled_folder_does_not_follow_its_links_again)
{
    enter_folder();
    char here[PATH_MAX], settled[PATH_MAX], out[PATH_MAX], whole[PATH_MAX + 16];
    CHECK(getcwd(here, sizeof here) != NULL);
    snprintf(whole, sizeof whole, "%s/now/m", here);
    const char *folder = fsti_path_settle("now", settled);
    CHECK(folder == settled && strcmp(fsti_path_name(settled), "a") == 0);
    CHECK_INT(unlink("now"), 0);
    CHECK_INT(symlink("b", "now"), 0);
    const char *const inside[] = {"now/m", "./now/m", "now//m", ".//now/./m", whole};
    static const char *const spellings[] = {"now", "./now", "now/", ".//now//."};
    for (size_t i = 0; i < sizeof inside / sizeof *inside; i++)
        for (size_t k = 0; k < sizeof spellings / sizeof *spellings; k++) {
            const char *found = fsti_path_settle_inside(inside[i], spellings[k], settled, out);
            CHECK(strstr(found, "/a/m") != NULL);
        }
    static const char *const outside[] = {"now/../now/m", "b/m"};
    for (size_t i = 0; i < 2; i++)
        CHECK(strstr(fsti_path_settle_inside(outside[i], "now", settled, out), "b/m") != NULL);
    CHECK(strcmp(fsti_path_settle_inside("nowhere", "now", settled, out), "nowhere") == 0);
    CHECK(strcmp(fsti_path_settle_inside("http://h/now/m", "now", settled, out),
                 "http://h/now/m") == 0);
    leave_folder();
}

TEST(the_root_is_a_folder_like_others)
{
    char out[PATH_MAX], settled[PATH_MAX], folder[PATH_MAX];
    CHECK(getcwd(folder, sizeof folder) != NULL && chdir("/") == 0);
    static const char *const roots[] = {"/", ".", "//", "/.", "./"};
    for (size_t i = 0; i < sizeof roots / sizeof *roots; i++) {
        CHECK(fsti_path_resolve(roots[i], false, out) && strcmp(out, "/") == 0);
        CHECK(is_same_folder(fsti_path_settle(roots[i], settled), "/"));
        CHECK(strcmp(fsti_path_settle_inside("/m", roots[i], "/", out), "/m") == 0);
        CHECK(is_same_folder(fsti_path_settle_inside(roots[i], roots[i], "/", out), "/"));
    }
    CHECK_INT(chdir(folder), 0);
}
