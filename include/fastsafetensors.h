// SPDX-License-Identifier: Apache-2.0
/// libfastsafetensors loads and saves safetensors models. Include this header.
///
///     fst_model *model;
///     fst_loader *loader;
///     fst_tensor *tensor;
///     if (fst_model_open("model.safetensors", NULL, &model, NULL) != FST_OK) return 1;
///     if (fst_loader_open(model, NULL, &loader, NULL) != FST_OK) return 1;
///     while (fst_loader_next(loader, -1, &tensor, NULL) == FST_OK)
///         fst_tensor_unref(tensor);
///     fst_loader_close(loader);
///     fst_model_close(model);
///
///     base.h     status codes, errors, the log, and the rules for the whole interface
///     model.h    fst_model: an open file, sharded set, folder or URL, and its tensors
///     loader.h   fst_loader: loads all or some tensors, at once or as a stream
///     tensor.h   fst_tensor: a loaded tensor
///     writer.h   fst_save(), and fst_writer: saves a file or a sharded set
///     verify.h   manifests and signatures
///     remote.h   access to URLs
///     dtype.h    element types
///     device.h   the CPU and GPUs
///     version.h  the version
///
/// A function that can fail returns an fst_status and takes an optional fst_error as its last
/// parameter. NULL and invalid arguments are FST_E_ARGUMENT, never a crash. Different handles may
/// be used from different threads at once; the comment of each handle says what one handle allows.
#ifndef FASTSAFETENSORS_H
#define FASTSAFETENSORS_H

#include "fastsafetensors/base.h"
#include "fastsafetensors/device.h"
#include "fastsafetensors/dtype.h"
#include "fastsafetensors/loader.h"
#include "fastsafetensors/model.h"
#include "fastsafetensors/remote.h"
#include "fastsafetensors/tensor.h"
#include "fastsafetensors/verify.h"
#include "fastsafetensors/version.h"
#include "fastsafetensors/writer.h"

#endif
