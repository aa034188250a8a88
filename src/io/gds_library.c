// SPDX-License-Identifier: Apache-2.0
/// Loads and starts cuFile and hipFile, once per process.
#include "gds_library.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/// cuFile starts within a second.
#define START_MS 10000u

static const fsti_gds_system usual_system = {.module = "/proc/driver/nvidia-fs",
                                             .module_list = "/proc/modules",
                                             .udev = "/run/udev/data",
                                             .start_ms = START_MS};
static fsti_gds_system current = {.module = "/proc/driver/nvidia-fs",
                                  .module_list = "/proc/modules",
                                  .udev = "/run/udev/data",
                                  .start_ms = START_MS};

void fsti_gds_fake_system(const fsti_gds_system *system) {
    current = usual_system;
    if (system->module != NULL) current.module = system->module;
    if (system->module_list != NULL) current.module_list = system->module_list;
    if (system->udev != NULL) current.udev = system->udev;
    if (system->start_ms != 0) current.start_ms = system->start_ms;
}

/// Whether cuFile's settings enable peer-to-peer reads, which need no kernel module.
static bool wants_peer_to_peer(void) {
    char text[16384];
    int fd = open("/etc/cufile.json", O_RDONLY | O_CLOEXEC);
    ssize_t size = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0) close(fd);
    text[size < 0 ? 0 : size] = '\0';
    const char *key = strstr(text, "\"use_pci_p2pdma\"");
    if (key == NULL) return false;
    key += strlen("\"use_pci_p2pdma\"");
    key += strspn(key, " \t\r\n:");
    return strncmp(key, "true", 4) == 0;
}

bool fsti_gds_has_module(bool is_hip) {
    return is_hip || access(current.module, F_OK) == 0 || wants_peer_to_peer();
}

/// A library, and the state of its start.
typedef struct gds_library {
    fsti_gds_api api;
    fsti_library_start start;
} gds_library;
static gds_library libraries[2];

const char *fsti_gds_container_hint(const fsti_gds_api *api) {
    if (api != &libraries[0].api || access(current.udev, F_OK) == 0) return "";
    return ". /run/udev is missing here, which cuFile needs: mount it into the container";
}

static void start_library(void *context) {
    gds_library *library = context;
    library->api.result = library->api.driver_open().error;
}

static void load_library(gds_library *library, bool is_hip) {
    static const char *const names[2][4] = {
        {"cuFileDriverOpen", "cuFileHandleRegister", "cuFileHandleDeregister", "cuFileRead"},
        {"hipFileDriverOpen", "hipFileHandleRegister", "hipFileHandleDeregister", "hipFileRead"}};
    fsti_gds_api *api = &library->api;
    api->library = is_hip ? "libhipfile.so" : "libcufile.so.0";
    api->owner = getpid();
    library->start = (fsti_library_start){.run = start_library, .context = library};
    void *handle = dlopen(api->library, RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL && is_hip) handle = dlopen("libhipfile.so.0", RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL) {
        snprintf(api->reason, sizeof api->reason, "%s was not found", api->library);
        return;
    }
    void *found[4];
    for (size_t i = 0; i < 4; i++) {
        found[i] = dlsym(handle, names[is_hip][i]);
        if (found[i] != NULL) continue;
        snprintf(api->reason, sizeof api->reason, "%s lacks %s", api->library, names[is_hip][i]);
        return;
    }
    memcpy(&api->driver_open, &found[0], sizeof found[0]);
    memcpy(&api->handle_register, &found[1], sizeof found[1]);
    memcpy(&api->handle_deregister, &found[2], sizeof found[2]);
    memcpy(&api->read, &found[3], sizeof found[3]);
    api->is_loaded = true;
}

static void load_cufile(void) { load_library(&libraries[0], false); }
static void load_hipfile(void) { load_library(&libraries[1], true); }

const fsti_gds_api *fsti_gds_library(bool is_hip, char *reason, size_t reason_size) {
    static atomic_bool tried_cufile, tried_hipfile;
    gds_library *library = &libraries[is_hip];
    fsti_gds_api *api = &library->api;
    fsti_library_once(is_hip ? &tried_hipfile : &tried_cufile, is_hip ? load_hipfile : load_cufile);
    if (!api->is_loaded) {
        snprintf(reason, reason_size, "%s", api->reason);
        return NULL;
    }
    // cuFile 1.20 reads this file in a loop that does not end if it cannot be opened.
    if (!is_hip && access(current.module_list, F_OK) != 0) {
        snprintf(reason, reason_size, "%s was not started: it needs %s, which does not exist here",
                 api->library, current.module_list);
        return NULL;
    }
    if (!fsti_library_start_within(&library->start, current.start_ms)) {
        snprintf(reason, reason_size, "%s has not started within %u ms; its log is cufile.log",
                 api->library, current.start_ms);
        return NULL;
    }
    if (api->result == 0) return api;
    snprintf(reason, reason_size, "%s could not be started (error %d)", api->library, api->result);
    return NULL;
}
