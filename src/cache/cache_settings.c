// SPDX-License-Identifier: Apache-2.0
/// Where the cache is, how large it may be, and whether it has to be there.
#include <stdio.h>
#include <string.h>

#include "cache_private.h"

static struct {
    bool is_said; ///< by the program; else the environment counts
    cache_settings told;
} settings;

fst_status fsti_cache_check(const fst_remote_options *options, fst_error *error) {
    const char *folder = options->cache_dir == NULL ? "" : options->cache_dir;
    if (strlen(folder) >= sizeof settings.told.folder)
        return fsti_error_set(error, FST_E_ARGUMENT, FSTI_NOWHERE, "cache_dir is too long");
    if (fsti_path_is_address(folder))
        return fsti_address_refuse(folder, "the cache is a folder of this machine", error);
    return FST_OK;
}

void fsti_cache_configure(const fst_remote_options *options) {
    const char *folder = options->cache_dir == NULL ? "" : options->cache_dir;
    fsti_cache_hold();
    settings.is_said = folder[0] != '\0';
    memcpy(settings.told.folder, folder, strlen(folder) + 1);
    settings.told.bytes_max = options->cache_bytes_max;
    settings.told.is_required = options->cache_required != 0 || options->cache_offline != 0;
    fsti_cache_release();
}

/// The folder that "auto" is; false where nothing says one.
static bool find_folder(char *out, size_t size) {
    const char *base = fsti_net_environment("FASTSAFETENSORS_CACHE_DIR");
    int used = 0;
    if (base != NULL && strcmp(base, "auto") != 0 && strcmp(base, "off") != 0)
        used = snprintf(out, size, "%s", base);
    else if ((base = fsti_net_environment("XDG_CACHE_HOME")) != NULL && base[0] == '/')
        used = snprintf(out, size, "%s/fastsafetensors/objects", base);
    else if ((base = fsti_net_environment("HOME")) != NULL && base[0] == '/')
        used = snprintf(out, size, "%s/.cache/fastsafetensors/objects", base);
    return used > 0 && (size_t)used < size;
}

fst_status fsti_cache_settings(const char *folder, cache_settings *out, fst_error *error) {
    fsti_cache_hold();
    *out = settings.told;
    bool is_said = settings.is_said;
    fsti_cache_release();
    const char *environment = fsti_net_environment("FASTSAFETENSORS_CACHE_DIR");
    const char *wanted = folder != NULL ? folder : is_said ? out->folder : environment;
    char text[CACHE_PATH_BYTES] = "";
    if (wanted != NULL && strlen(wanted) < sizeof text) memcpy(text, wanted, strlen(wanted) + 1);
    if (strcmp(text, "off") == 0) text[0] = '\0';
    if (strcmp(text, "auto") == 0 && !find_folder(text, sizeof text)) {
        out->folder[0] = '\0';
        return fsti_error_set(error, FST_E_ARGUMENT, FSTI_NOWHERE,
                              "cache_dir is auto, but neither FASTSAFETENSORS_CACHE_DIR, "
                              "XDG_CACHE_HOME nor HOME names a folder");
    }
    memcpy(out->folder, text, sizeof text);
    return FST_OK;
}
