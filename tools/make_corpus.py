#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the seed corpus of the fuzz targets: small, named by what they show."""

import pathlib
import struct

ROOT = pathlib.Path(__file__).resolve().parent.parent / "fuzz/corpus"
U8 = '"dtype":"U8","shape":[2],"data_offsets":[0,2]'
HEADERS = {
    "empty_object": ("{}", 0),
    "one_tensor": (f'{{"a":{{{U8}}}}}', 2),
    "spaces": (f' {{ "a" : {{ {U8.replace(",", " , ")} }} }}  ', 2),
    "metadata": (f'{{"__metadata__":{{"k":"v","k":"w"}},"a":{{{U8}}}}}', 2),
    "escapes": (f'{{"\\u0061\\n\\ud83d\\ude00":{{{U8}}}}}', 2),
    "array_entry": ('{"a":["U8",[2],[0,2]]}', 2),
    "extra_fields": (f'{{"a":{{{U8},"x":[1.5e3,{{"y":null}},true]}}}}', 2),
    "unordered": (f'{{"b":{{"dtype":"U8","shape":[1],"data_offsets":[2,3]}},"a":{{{U8}}}}}', 3),
    "zero_size": ('{"z":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}', 0),
    "sub_byte": ('{"a":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}}', 2),
    "hole(fail)": ('{"a":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}', 3),
    "duplicate(fail)": (f'{{"a":{{{U8}}},"a":{{{U8}}}}}', 2),
    "overflow(fail)": ('{"a":{"dtype":"U8","shape":[9223372036854775808,4,0],'
                       '"data_offsets":[0,0]}}', 0),
    "trailing(fail)": (f'{{"a":{{{U8}}}}}', 9),
}
INDICES = {
    "two_files": '{"metadata":{"total_size":4},"weight_map":{"a":"x.safetensors","b":"y"}}',
    "escaped": '{"weight_map":{"\\u0061":"x\\u002esafetensors"}}',
    "leaves(fail)": '{"weight_map":{"a":"../x"}}',
    "no_map(fail)": '{"metadata":{}}',
}

for name, (text, data_bytes) in HEADERS.items():
    path = ROOT / "header" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    encoded = text.encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + bytes(data_bytes))
for name, text in INDICES.items():
    path = ROOT / "index" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
