// The handlers of stoker_sample and stoker_largest: check every shape, then choose.
#include "ffi.h"
#include "sample.h"

namespace stoker {
namespace {

namespace ffi = xla::ffi;
using Logits = ffi::BufferR2<ffi::F32>;
using Floats = ffi::BufferR1<ffi::F32>;
using Ints = ffi::BufferR1<ffi::S32>;

ffi::Error choose(ffi::ThreadPool threads, Logits logits, Floats temperature, Ints top_k, Floats top_p,
                  Floats min_p, Floats uniform, ffi::Result<Ints> token, ffi::Result<Floats> total,
                  int64_t isa, int64_t limit) {
  Sample s{};
  s.B = logits.dimensions()[0];
  s.V = logits.dimensions()[1];
  const bool shapes = has_shape(temperature, {s.B}) && has_shape(top_k, {s.B}) && has_shape(top_p, {s.B}) &&
                      has_shape(min_p, {s.B}) && has_shape(uniform, {s.B}) && has_shape(*token, {s.B}) &&
                      has_shape(*total, {s.B});
  if (!shapes || s.V < 1) return ffi::Error::InvalidArgument("sample: shapes do not match");
  const Kernels* table = kernels(static_cast<Isa>(isa));
  if (!table) return ffi::Error::InvalidArgument("sample: instruction set not available");
  s.logits = logits.typed_data();
  s.temperature = temperature.typed_data();
  s.top_k = top_k.typed_data();
  s.top_p = top_p.typed_data();
  s.min_p = min_p.typed_data();
  s.uniform = uniform.typed_data();
  s.token = token->typed_data();
  s.total = total->typed_data();
  Crew pool = crew(threads, limit);
  sample(pool, *table, s);
  return ffi::Error::Success();
}

ffi::Error find(ffi::ThreadPool threads, Logits logits, ffi::BufferR1<ffi::PRED> wanted,
                ffi::Result<Logits> value, ffi::Result<ffi::BufferR2<ffi::S32>> id, int64_t isa,
                int64_t limit) {
  Largest l{};
  l.B = logits.dimensions()[0];
  l.V = logits.dimensions()[1];
  l.count = value->dimensions()[1];
  const bool shapes = has_shape(wanted, {l.B}) && has_shape(*value, {l.B, l.count}) &&
                      has_shape(*id, {l.B, l.count});
  if (!shapes || l.V < 1) return ffi::Error::InvalidArgument("largest: shapes do not match");
  const Kernels* table = kernels(static_cast<Isa>(isa));
  if (!table) return ffi::Error::InvalidArgument("largest: instruction set not available");
  l.logits = logits.typed_data();
  l.wanted = wanted.typed_data();
  l.value = value->typed_data();
  l.id = id->typed_data();
  Crew pool = crew(threads, limit);
  largest(pool, *table, l);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace stoker

XLA_FFI_DEFINE_HANDLER_SYMBOL(stoker_sample, stoker::choose,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<stoker::Logits>()
                                  .Arg<stoker::Floats>()
                                  .Arg<stoker::Ints>()
                                  .Arg<stoker::Floats>()
                                  .Arg<stoker::Floats>()
                                  .Arg<stoker::Floats>()
                                  .Ret<stoker::Ints>()
                                  .Ret<stoker::Floats>()
                                  .Attr<int64_t>("isa")
                                  .Attr<int64_t>("threads"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(stoker_largest, stoker::find,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<stoker::Logits>()
                                  .Arg<xla::ffi::BufferR1<xla::ffi::PRED>>()
                                  .Ret<stoker::Logits>()
                                  .Ret<xla::ffi::BufferR2<xla::ffi::S32>>()
                                  .Attr<int64_t>("isa")
                                  .Attr<int64_t>("threads"));
