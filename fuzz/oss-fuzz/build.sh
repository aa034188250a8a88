#!/bin/bash -eu
# SPDX-License-Identifier: Apache-2.0
# Builds every fuzz target with the service's compiler, flags and engine ($CC, $CFLAGS,
# $LIB_FUZZING_ENGINE), and packs the seeds beside them ($OUT).
meson setup "$WORK/build" --wipe -Dfuzzing=true -Ddefault_library=static -Dbuildtype=plain \
    -Db_lundef=false -Dfuzzing_engine="${LIB_FUZZING_ENGINE:--fsanitize=fuzzer}"
ninja -C "$WORK/build" $(ninja -C "$WORK/build" -t targets all | sed -n 's|^\(fuzz/fuzz_[a-z_]*\):.*|\1|p')
for target in "$WORK"/build/fuzz/fuzz_*; do
    [ -x "$target" ] && [ -f "$target" ] || continue
    name=$(basename "$target")
    cp "$target" "$OUT/"
    corpus=fuzz/corpus/${name#fuzz_}
    [ -d "$corpus" ] && zip -qj "$OUT/${name}_seed_corpus.zip" "$corpus"/*
done
