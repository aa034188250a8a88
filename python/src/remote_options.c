// SPDX-License-Identifier: Apache-2.0
/// configure_remote(): how addresses are asked for.
#include "module.h"

#include <string.h>

static int read_style(const char *word, fst_remote_options *options) {
    static const char *const styles[] = {"auto", "path", "host"};
    for (int i = 0; i < FST_BUCKET_STYLE_COUNT; i++)
        if (strcmp(word, styles[i]) == 0) {
            options->bucket_style = (fst_bucket_style)i;
            return 1;
        }
    PyErr_Format(PyExc_ValueError, "bucket_style is 'auto', 'path' or 'host', not '%s'", word);
    return 0;
}

PyObject *fstpy_configure_remote(PyObject *module, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"endpoint",      "region",          "access_key",    "secret_key",
                            "session_token", "bearer_token",    "sas_token",     "account",
                            "ca_file",       "anonymous",       "bucket_style",  "connect_ms",
                            "first_byte_ms", "stall_ms",        "retry_base_ms", "retry_cap_ms",
                            "tries_max",     "connections_max", "no_overwrite",  NULL};
    fst_remote_options o = {.struct_size = sizeof o};
    const char *style = "auto";
    fst_error error;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "|$zzzzzzzzzpsIIIIIIIp", names, &o.endpoint, &o.region, &o.access_key,
            &o.secret_key, &o.session_token, &o.bearer_token, &o.sas_token, &o.account, &o.ca_file,
            &o.anonymous, &style, &o.connect_ms, &o.first_byte_ms, &o.stall_ms, &o.retry_base_ms,
            &o.retry_cap_ms, &o.tries_max, &o.connections_max, &o.no_overwrite) ||
        !read_style(style, &o))
        return NULL;
    if (fst_remote_configure(&o, &error) != FST_OK)
        return fstpy_raise(PyModule_GetState(module), &error);
    Py_RETURN_NONE;
}
