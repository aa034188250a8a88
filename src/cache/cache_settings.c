// SPDX-License-Identifier: Apache-2.0
/// Settings of the cache: its folder, its size limit, and whether it is required.
#include <stdio.h>
#include <string.h>

#include "cache_private.h"
#include "http/http.h"
#include "location/location.h"

static struct {
    bool is_configured; ///< set by the program; otherwise the environment applies
    cache_settings given;
} settings;

fst_status fsti_cache_check(const fst_remote_options *options, fst_error *error) {
    const char *folder = options->cache_dir == NULL ? "off" : options->cache_dir;
    if (folder[0] == '\0')
        return fsti_error_set(error, FST_E_ARGUMENT, FSTI_NO_LOCATION,
                              "cache_dir is empty; use NULL for the environment's, or \"off\"");
    if (strlen(folder) >= sizeof settings.given.folder)
        return fsti_error_set(error, FST_E_ARGUMENT, FSTI_NO_LOCATION, "cache_dir is too long");
    FST_TRY(fsti_location_require_file(folder, "the cache must be a local folder", error));
    if (options->cache_required != 0 && options->cache_dir != NULL && strcmp(folder, "off") == 0)
        return fsti_error_set(error, FST_E_ARGUMENT, FSTI_NO_LOCATION,
                              "cache_required needs a cache, and cache_dir is \"off\"");
    return FST_OK;
}

void fsti_cache_configure(const fst_remote_options *options) {
    const char *folder = options->cache_dir == NULL ? "" : options->cache_dir;
    fsti_cache_lock();
    settings.is_configured = folder[0] != '\0';
    memcpy(settings.given.folder, folder, strlen(folder) + 1);
    settings.given.bytes_max = options->cache_bytes_max;
    settings.given.is_required = options->cache_required != 0;
    fsti_cache_unlock();
}

/// The folder for "auto". False if no variable names one.
static bool find_folder(char *out, size_t size) {
    const char *base = fsti_http_environment("FASTSAFETENSORS_CACHE_DIR");
    int used = 0;
    if (base != NULL && strcmp(base, "auto") != 0 && strcmp(base, "off") != 0)
        used = snprintf(out, size, "%s", base);
    else if ((base = fsti_http_environment("XDG_CACHE_HOME")) != NULL && base[0] == '/')
        used = snprintf(out, size, "%s/fastsafetensors/objects", base);
    else if ((base = fsti_http_environment("HOME")) != NULL && base[0] == '/')
        used = snprintf(out, size, "%s/.cache/fastsafetensors/objects", base);
    return used > 0 && (size_t)used < size;
}

fst_status fsti_cache_settings(const char *folder, cache_settings *out, fst_error *error) {
    // Before the cache's lock: no two locks that fork() acquires are taken in another order.
    bool is_offline = fsti_http_is_offline();
    fsti_cache_lock();
    *out = settings.given;
    out->is_required |= is_offline; // offline, the cache is the only source
    bool is_configured = settings.is_configured;
    fsti_cache_unlock();
    const char *environment = fsti_http_environment("FASTSAFETENSORS_CACHE_DIR");
    const char *wanted = folder != NULL ? folder : is_configured ? out->folder : environment;
    char text[CACHE_PATH_BYTES] = "";
    if (wanted != NULL && strlen(wanted) < sizeof text) memcpy(text, wanted, strlen(wanted) + 1);
    if (strcmp(text, "off") == 0) text[0] = '\0';
    if (strcmp(text, "auto") == 0 && !find_folder(text, sizeof text)) {
        out->folder[0] = '\0';
        return fsti_error_set(error, FST_E_ARGUMENT, FSTI_NO_LOCATION,
                              "cache_dir is auto, but none of FASTSAFETENSORS_CACHE_DIR, "
                              "XDG_CACHE_HOME and HOME is set to a folder");
    }
    memcpy(out->folder, text, sizeof text);
    return FST_OK;
}
