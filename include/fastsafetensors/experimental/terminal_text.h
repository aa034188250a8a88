// SPDX-License-Identifier: Apache-2.0
/// Text at a terminal: printing names from untrusted files, and reading sizes that users type.
///
///     uint32_t code;
///     int columns;
///     for (size_t n; (n = fst_text_step(text, size, &code, &columns)) > 0; text += n, size -= n)
///         if (columns < 0)
///             putchar('?');
///         else
///             fwrite(text, 1, n, stdout);
#ifndef FASTSAFETENSORS_TERMINAL_TEXT_H
#define FASTSAFETENSORS_TERMINAL_TEXT_H

#include "../base.h"

#ifdef __cplusplus
extern "C" {
#endif

/// The code point that fst_text_step() reports for a byte that does not begin a character.
#define FST_TEXT_INVALID UINT32_MAX

/// Reads the first character of a text. Returns its length in bytes: 1 to 4, or 0 if text_size is
/// 0. *code is its code point, or FST_TEXT_INVALID for a byte that is not part of well-formed
/// UTF-8. *columns is its width on a terminal (0 to 2), or -1 if it must be replaced: control
/// characters (C0, DEL, C1), characters that change the direction of text, line separators,
/// zero-width characters (joiners included), and invalid bytes. Either pointer may be NULL. Error
/// messages and log lines of the library have '?' in their place.
FST_API size_t fst_text_step(const char *text, size_t text_size, uint32_t *code, int *columns);

/// Parses a size: digits, an optional decimal fraction, and an optional unit in either case. Spaces
/// around these are ignored. As in GNU's commands, K, M, G, T and KiB, MiB, GiB, TiB are powers of
/// 1024, and KB, MB, GB, TB are powers of 1000. A fraction of a byte is dropped. Returns 1 and sets
/// *size_bytes, or returns 0 if the text is not a size, or one of 2^64 bytes or more. The command,
/// the Python package and the environment variables of this library use this rule.
FST_API int fst_size_parse(const char *text, uint64_t *size_bytes);

#ifdef __cplusplus
}
#endif

#endif
