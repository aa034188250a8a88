// SPDX-License-Identifier: Apache-2.0
/// The umbrella header of libfastsafetensors: include this one and nothing else.
///
/// The library opens safetensors models (one file, many files, a folder, or an index of shards),
/// describes their tensors without moving data, loads tensors into memory, and saves them.
///
///   fst_model   an opened model: validated headers, one open descriptor per file  (model.h)
///   fst_loader  a running or finished load of some or all of its tensors          (loader.h)
///   fst_tensor  one loaded tensor; it owns its memory by reference count          (loader.h)
///   fst_writer  a save in progress: one file or a sharded set, all or nothing     (writer.h)
///   addresses   how objects of servers and stores are asked for                       (remote.h)
///   manifests   digests that what is loaded is held against                        (verify.h)
///   fst_device  where tensors are loaded to: the processors' memory, or a GPU's   (device.h)
///
/// Every function that can fail returns an fst_status and takes an optional fst_error as its last
/// parameter. NULL and nonsense arguments give FST_E_ARGUMENT, never a crash. Unless a function
/// says otherwise, distinct handles may be used from distinct threads at once; what is safe on one
/// handle from several threads is said with each type.
#ifndef FASTSAFETENSORS_H
#define FASTSAFETENSORS_H

#include "fastsafetensors/base.h"
#include "fastsafetensors/device.h"
#include "fastsafetensors/dtype.h"
#include "fastsafetensors/loader.h"
#include "fastsafetensors/model.h"
#include "fastsafetensors/remote.h"
#include "fastsafetensors/verify.h"
#include "fastsafetensors/version.h"
#include "fastsafetensors/writer.h"

#endif
