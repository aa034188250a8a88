// SPDX-License-Identifier: Apache-2.0
/// The list of dtypes, in numeric order: X(number, name in the file, bits per element, rank in the
/// order of the reference writer). A new dtype gets the next number, so that compiled programs stay
/// valid, and any rank.
#ifndef FSTI_DTYPE_MAP_H
#define FSTI_DTYPE_MAP_H

#define FSTI_DTYPE_MAP(X)                                                                          \
    X(0, BOOL, 8, 0)                                                                               \
    X(1, F4, 4, 1)                                                                                 \
    X(2, F6_E2M3, 6, 2)                                                                            \
    X(3, F6_E3M2, 6, 3)                                                                            \
    X(4, U8, 8, 4)                                                                                 \
    X(5, I8, 8, 5)                                                                                 \
    X(6, F8_E5M2, 8, 6)                                                                            \
    X(7, F8_E4M3, 8, 7)                                                                            \
    X(8, F8_E8M0, 8, 8)                                                                            \
    X(9, F8_E4M3FNUZ, 8, 9)                                                                        \
    X(10, F8_E5M2FNUZ, 8, 10)                                                                      \
    X(11, I16, 16, 11)                                                                             \
    X(12, U16, 16, 12)                                                                             \
    X(13, F16, 16, 13)                                                                             \
    X(14, BF16, 16, 14)                                                                            \
    X(15, I32, 32, 15)                                                                             \
    X(16, U32, 32, 16)                                                                             \
    X(17, F32, 32, 17)                                                                             \
    X(18, C64, 64, 18)                                                                             \
    X(19, F64, 64, 19)                                                                             \
    X(20, I64, 64, 20)                                                                             \
    X(21, U64, 64, 21)

#endif
