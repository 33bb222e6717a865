// The handlers of stoker_sample, stoker_logsumexp and stoker_largest: check every shape, then choose.
#include "ffi.h"
#include "sample.h"

namespace stoker {
namespace {

namespace ffi = xla::ffi;
using Logits = ffi::BufferR2<ffi::F32>;
using Floats = ffi::BufferR1<ffi::F32>;
using Ints = ffi::BufferR1<ffi::S32>;
using Flags = ffi::BufferR1<ffi::PRED>;
using IntRows = ffi::BufferR2<ffi::S32>;
using WordRows = ffi::BufferR2<ffi::U32>;

ffi::Error choose(ffi::ThreadPool threads, Logits logits, Floats temperature, Ints top_k,
                  Floats top_p, Floats min_p, Floats repetition, Floats presence, Floats frequency,
                  IntRows bias_ids, Logits bias_values, WordRows allowed, Flags has_mask,
                  IntRows end_ids, Ints min_lens, Ints prompt_lens, IntRows history, Ints slots,
                  Ints positions, Floats uniform, ffi::Result<Ints> token,
                  ffi::Result<Floats> total, int64_t isa, int64_t limit) {
  Sample s{};
  Edits& e = s.edits;
  s.B = logits.dimensions()[0];
  s.V = logits.dimensions()[1];
  s.S = temperature.dimensions()[0];
  e.C = history.dimensions()[1];
  e.N = bias_ids.dimensions()[1];
  e.E = end_ids.dimensions()[1];
  const auto all_have = [](int64_t n, const auto&... columns) {
    return (has_shape(columns, {n}) && ...);
  };
  const bool shapes =
      all_have(s.B, slots, positions, uniform, *token, *total) &&
      all_have(s.S, top_k, top_p, min_p, repetition, presence, frequency, has_mask, min_lens,
               prompt_lens) &&
      has_shape(bias_ids, {s.S, e.N}) && has_shape(bias_values, {s.S, e.N}) &&
      has_shape(allowed, {s.S, (s.V + 31) / 32}) && has_shape(end_ids, {s.S, e.E}) &&
      has_shape(history, {s.S, e.C});
  if (!shapes || s.V < 1 || s.S < 1) {
    return ffi::Error::InvalidArgument("sample: shapes do not match");
  }
  const Kernels* table = kernels(static_cast<Isa>(isa));
  if (!table) return ffi::Error::InvalidArgument("sample: instruction set not available");
  s.logits = logits.typed_data();
  s.slots = slots.typed_data();
  s.positions = positions.typed_data();
  s.uniform = uniform.typed_data();
  s.temperature = temperature.typed_data();
  s.top_k = top_k.typed_data();
  s.top_p = top_p.typed_data();
  s.min_p = min_p.typed_data();
  e.history = history.typed_data();
  e.prompt_lens = prompt_lens.typed_data();
  e.repetition = repetition.typed_data();
  e.presence = presence.typed_data();
  e.frequency = frequency.typed_data();
  e.bias_ids = bias_ids.typed_data();
  e.bias_values = bias_values.typed_data();
  e.allowed = allowed.typed_data();
  e.has_mask = has_mask.typed_data();
  e.end_ids = end_ids.typed_data();
  e.min_lens = min_lens.typed_data();
  s.token = token->typed_data();
  s.total = total->typed_data();
  Crew pool = crew(threads, limit);
  sample(pool, *table, s);
  return ffi::Error::Success();
}

ffi::Error sum_up(ffi::ThreadPool threads, Logits logits, ffi::Result<Floats> total, int64_t isa,
                  int64_t limit) {
  const int64_t B = logits.dimensions()[0], V = logits.dimensions()[1];
  if (!has_shape(*total, {B}) || V < 1) {
    return ffi::Error::InvalidArgument("logsumexp: shapes do not match");
  }
  const Kernels* table = kernels(static_cast<Isa>(isa));
  if (!table) return ffi::Error::InvalidArgument("logsumexp: instruction set not available");
  Crew pool = crew(threads, limit);
  logsumexp(pool, *table, logits.typed_data(), B, V, total->typed_data());
  return ffi::Error::Success();
}

ffi::Error find(ffi::ThreadPool threads, Logits logits, Flags wanted,
                ffi::Result<Logits> value, ffi::Result<IntRows> id, int64_t isa, int64_t limit) {
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
                                      .Arg<stoker::Logits>()    // logits
                                      .Arg<stoker::Floats>()    // temperature
                                      .Arg<stoker::Ints>()      // top_k
                                      .Arg<stoker::Floats>()    // top_p
                                      .Arg<stoker::Floats>()    // min_p
                                      .Arg<stoker::Floats>()    // repetition
                                      .Arg<stoker::Floats>()    // presence
                                      .Arg<stoker::Floats>()    // frequency
                                      .Arg<stoker::IntRows>()   // bias_ids
                                      .Arg<stoker::Logits>()    // bias_values
                                      .Arg<stoker::WordRows>()  // allowed
                                      .Arg<stoker::Flags>()     // has_mask
                                      .Arg<stoker::IntRows>()   // end_ids
                                      .Arg<stoker::Ints>()      // min_lens
                                      .Arg<stoker::Ints>()      // prompt_lens
                                      .Arg<stoker::IntRows>()   // history
                                      .Arg<stoker::Ints>()      // slots
                                      .Arg<stoker::Ints>()      // positions
                                      .Arg<stoker::Floats>()    // uniform
                                      .Ret<stoker::Ints>()
                                      .Ret<stoker::Floats>()
                                      .Attr<int64_t>("isa")
                                      .Attr<int64_t>("threads"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(stoker_logsumexp, stoker::sum_up,
                                  xla::ffi::Ffi::Bind()
                                      .Ctx<xla::ffi::ThreadPool>()
                                      .Arg<stoker::Logits>()
                                      .Ret<stoker::Floats>()
                                      .Attr<int64_t>("isa")
                                      .Attr<int64_t>("threads"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(stoker_largest, stoker::find,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<stoker::Logits>()
                                  .Arg<stoker::Flags>()
                                  .Ret<stoker::Logits>()
                                  .Ret<stoker::IntRows>()
                                  .Attr<int64_t>("isa")
                                  .Attr<int64_t>("threads"));
