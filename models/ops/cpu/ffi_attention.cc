// The handlers of stoker_attention and stoker_latent_attention: they check every shape and type,
// then attend.
#include <algorithm>
#include <limits>
#include <string>

#include "attention.h"
#include "ffi.h"

namespace stoker {
namespace {

namespace ffi = xla::ffi;
using Floats = ffi::BufferR3<ffi::F32>;
using Lse = ffi::BufferR2<ffi::F32>;
using Share = ffi::BufferR1<ffi::S32>;

// Which share of the pages' tokens is here, and where logarithms of sums go. Of one share, `share`
// and `lse` have no elements. False where they do not fit.
bool take_share(const Share& share, int64_t shares, Lse& lse, Attention* a) {
  if (shares == 1) return share.element_count() == 0 && lse.element_count() == 0;
  if (!has_shape(share, {1}) || !has_shape(lse, {a->T, a->N})) return false;
  a->share = *share.typed_data();
  a->shares = shares;
  a->lse = lse.typed_data();
  return shares > 1 && a->share >= 0 && a->share < shares &&
         a->M * a->Z * shares <= std::numeric_limits<int32_t>::max();
}

// The type of pages; false of one that they do not have.
bool take_type(ffi::DataType given, Type* type) {
  if (given != ffi::DataType::F32 && given != ffi::DataType::BF16 && given != ffi::DataType::S8) {
    return false;
  }
  *type = given == ffi::DataType::F32 ? Type::kF32
          : given == ffi::DataType::BF16 ? Type::kBF16
                                         : Type::kI8;
  return true;
}

// The scales of keys or of values, updated in place; false where they do not fit.
bool take_scales(const ffi::RemainingArgs& args, const ffi::RemainingRets& results, size_t index,
                 const Attention& a, float** scales) {
  const auto given = args.get<ffi::BufferR3<ffi::F32>>(index);
  auto result = results.get<ffi::BufferR3<ffi::F32>>(index);
  if (given.has_error() || result.has_error()) return false;
  *scales = (*result)->typed_data();
  return has_shape(*given, {a.P, a.K, a.Z}) && has_shape(**result, {a.P, a.K, a.Z}) &&
         given->typed_data() == *scales;
}

ffi::Error attention(ffi::ThreadPool threads, Floats q, Floats k, Floats v,
                     ffi::BufferR2<ffi::F32> cos, ffi::BufferR2<ffi::F32> sin, ffi::AnyBuffer k_pages,
                     ffi::AnyBuffer v_pages, ffi::BufferR1<ffi::S32> query_start,
                     ffi::BufferR1<ffi::S32> kv_lens, ffi::BufferR2<ffi::S32> page_table,
                     ffi::BufferR1<ffi::F32> sinks, Share share, ffi::RemainingArgs scales,
                     ffi::Result<Floats> out, ffi::Result<Lse> lse,
                     ffi::Result<ffi::AnyBuffer> k_out, ffi::Result<ffi::AnyBuffer> v_out,
                     ffi::RemainingRets scales_out, int64_t window, float softcap, float scale,
                     int64_t shares, bool rounded, int64_t isa, int64_t limit) {
  Attention a{};
  a.T = q.dimensions()[0];
  a.N = q.dimensions()[1];
  a.H = q.dimensions()[2];
  a.K = k.dimensions()[1];
  a.half = cos.dimensions()[1];
  a.S = kv_lens.dimensions()[0];
  a.M = page_table.dimensions()[1];
  if (k_pages.dimensions().size() != 4) {
    return ffi::Error::InvalidArgument("attention: key pages must be [P, K, H, Z]");
  }
  a.P = k_pages.dimensions()[0];
  a.Z = k_pages.dimensions()[3];
  const auto type = k_pages.element_type();
  const bool shapes =
      has_shape(k, {a.T, a.K, a.H}) && has_shape(v, {a.T, a.K, a.H}) &&
      has_shape(k_pages, {a.P, a.K, a.H, a.Z}) && has_shape(v_pages, {a.P, a.K, a.Z, a.H}) &&
      has_shape(*k_out, {a.P, a.K, a.H, a.Z}) && has_shape(*v_out, {a.P, a.K, a.Z, a.H}) &&
      has_shape(cos, {a.T, a.half}) && has_shape(sin, {a.T, a.half}) &&
      has_shape(query_start, {a.S + 1}) && has_shape(page_table, {a.S, a.M}) &&
      (sinks.element_count() == 0 || has_shape(sinks, {a.N})) &&
      has_shape(*out, {a.T, a.N, a.H});
  const bool sizes = a.H > 0 && a.H <= kMaxHead && 2 * a.half <= a.H && a.K > 0 && a.N % a.K == 0 &&
                     a.Z > 0 && a.Z % kKeys == 0 && a.P > 0 &&
                     a.M * a.Z <= std::numeric_limits<int32_t>::max();
  if (!shapes || !sizes || !take_share(share, shares, *lse, &a)) {
    return ffi::Error::InvalidArgument("attention: shapes do not match");
  }
  if (!take_type(type, &a.type) || v_pages.element_type() != type || k_out->element_type() != type ||
      v_out->element_type() != type) {
    return ffi::Error::InvalidArgument("attention: pages must be float32, bfloat16 or int8");
  }
  const bool codes = a.type == Type::kI8;
  if (scales.size() != (codes ? 2u : 0u) || scales_out.size() != scales.size()) {
    return ffi::Error::InvalidArgument("attention: scales come with int8 pages, and only with them");
  }
  if (codes && !(take_scales(scales, scales_out, 0, a, &a.k_scales) &&
                 take_scales(scales, scales_out, 1, a, &a.v_scales))) {
    return ffi::Error::InvalidArgument(
        "attention: scales must be float32 [P, K, Z], and one buffer with their results");
  }
  // XLA copies the pages into the results itself where they are not donated.
  if (k_out->untyped_data() != k_pages.untyped_data() ||
      v_out->untyped_data() != v_pages.untyped_data()) {
    return ffi::Error::InvalidArgument("attention: pages and their results are not one buffer");
  }
  const Kernels* table = kernels(static_cast<Isa>(isa));
  if (!table) return ffi::Error::InvalidArgument("attention: instruction set not available");
  a.q = q.typed_data();
  a.k = k.typed_data();
  a.v = v.typed_data();
  a.cos = cos.typed_data();
  a.sin = sin.typed_data();
  a.k_pages = k_out->untyped_data();
  a.v_pages = v_out->untyped_data();
  a.query_start = query_start.typed_data();
  a.kv_lens = kv_lens.typed_data();
  a.page_table = page_table.typed_data();
  a.window = window;
  a.softcap = softcap;
  a.scale = scale;
  a.rounded = rounded;
  a.sinks = sinks.element_count() ? sinks.typed_data() : nullptr;
  a.out = out->typed_data();
  Crew pool = crew(threads, limit);
  const std::string problem = attend(pool, *table, a);
  if (!problem.empty()) return ffi::Error::InvalidArgument("attention: " + problem);
  return ffi::Error::Success();
}

// Attention whose keys are its values too: one vector for each token, [P, Z, W].
ffi::Error latent_attention(ffi::ThreadPool threads, Floats q, ffi::BufferR2<ffi::F32> latent,
                            ffi::BufferR1<ffi::F32> norm, ffi::BufferR2<ffi::F32> cos,
                            ffi::BufferR2<ffi::F32> sin, ffi::AnyBuffer pages,
                            ffi::BufferR1<ffi::S32> query_start, ffi::BufferR1<ffi::S32> kv_lens,
                            ffi::BufferR2<ffi::S32> page_table, Share share,
                            ffi::Result<Floats> out, ffi::Result<Lse> lse,
                            ffi::Result<ffi::AnyBuffer> pages_out, int64_t rank, float eps,
                            float scale, int64_t shares, bool rounded, int64_t isa, int64_t limit) {
  Attention a{};
  a.T = q.dimensions()[0];
  a.N = q.dimensions()[1];
  a.H = q.dimensions()[2];
  a.K = 1;
  a.rank = rank;
  a.half = cos.dimensions()[1];
  a.S = kv_lens.dimensions()[0];
  a.M = page_table.dimensions()[1];
  if (pages.dimensions().size() != 3) {
    return ffi::Error::InvalidArgument("latent attention: pages must be [P, Z, W]");
  }
  a.P = pages.dimensions()[0];
  a.Z = pages.dimensions()[1];
  const auto type = pages.element_type();
  const bool shapes = has_shape(cos, {a.T, a.half}) && has_shape(sin, {a.T, a.half}) &&
                      (norm.element_count() == 0 || has_shape(norm, {rank})) &&
                      has_shape(latent, {a.T, a.H}) && has_shape(pages, {a.P, a.Z, a.H}) &&
                      has_shape(*pages_out, {a.P, a.Z, a.H}) && has_shape(query_start, {a.S + 1}) &&
                      has_shape(page_table, {a.S, a.M}) && has_shape(*out, {a.T, a.N, a.H});
  const bool sizes = a.H > 0 && a.H <= kMaxHead && rank > 0 && rank + 2 * a.half <= a.H && a.N > 0 &&
                     a.Z > 0 && a.Z % kKeys == 0 &&
                     a.P > 0 && a.M * a.Z <= std::numeric_limits<int32_t>::max();
  if (!shapes || !sizes || !take_share(share, shares, *lse, &a)) {
    return ffi::Error::InvalidArgument("latent attention: shapes do not match");
  }
  if (!take_type(type, &a.type) || a.type == Type::kI8 || pages_out->element_type() != type) {
    return ffi::Error::InvalidArgument("latent attention: pages must be float32 or bfloat16");
  }
  if (pages_out->untyped_data() != pages.untyped_data()) {
    return ffi::Error::InvalidArgument("latent attention: pages and their result are not one buffer");
  }
  const Kernels* table = kernels(static_cast<Isa>(isa));
  if (!table) return ffi::Error::InvalidArgument("latent attention: instruction set not available");
  a.q = q.typed_data();
  a.v = latent.typed_data();
  a.norm = norm.element_count() ? norm.typed_data() : nullptr;
  a.eps = eps;
  a.cos = cos.typed_data();
  a.sin = sin.typed_data();
  a.v_pages = pages_out->untyped_data();
  a.query_start = query_start.typed_data();
  a.kv_lens = kv_lens.typed_data();
  a.page_table = page_table.typed_data();
  a.scale = scale;
  a.rounded = rounded;
  a.out = out->typed_data();
  Crew pool = crew(threads, limit);
  const std::string problem = attend(pool, *table, a);
  if (!problem.empty()) return ffi::Error::InvalidArgument("latent attention: " + problem);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace stoker

XLA_FFI_DEFINE_HANDLER_SYMBOL(stoker_latent_attention, stoker::latent_attention,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<stoker::Floats>()
                                  .Arg<xla::ffi::BufferR2<xla::ffi::F32>>()
                                  .Arg<xla::ffi::BufferR1<xla::ffi::F32>>()
                                  .Arg<xla::ffi::BufferR2<xla::ffi::F32>>()
                                  .Arg<xla::ffi::BufferR2<xla::ffi::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::BufferR1<xla::ffi::S32>>()
                                  .Arg<xla::ffi::BufferR1<xla::ffi::S32>>()
                                  .Arg<xla::ffi::BufferR2<xla::ffi::S32>>()
                                  .Arg<stoker::Share>()
                                  .Ret<stoker::Floats>()
                                  .Ret<stoker::Lse>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<int64_t>("rank")
                                  .Attr<float>("eps")
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("shares")
                                  .Attr<bool>("rounded")
                                  .Attr<int64_t>("isa")
                                  .Attr<int64_t>("threads"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(stoker_attention, stoker::attention,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<stoker::Floats>()
                                  .Arg<stoker::Floats>()
                                  .Arg<stoker::Floats>()
                                  .Arg<xla::ffi::BufferR2<xla::ffi::F32>>()
                                  .Arg<xla::ffi::BufferR2<xla::ffi::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::BufferR1<xla::ffi::S32>>()
                                  .Arg<xla::ffi::BufferR1<xla::ffi::S32>>()
                                  .Arg<xla::ffi::BufferR2<xla::ffi::S32>>()
                                  .Arg<xla::ffi::BufferR1<xla::ffi::F32>>()
                                  .Arg<stoker::Share>()
                                  .RemainingArgs()
                                  .Ret<stoker::Floats>()
                                  .Ret<stoker::Lse>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .RemainingRets()
                                  .Attr<int64_t>("window")
                                  .Attr<float>("softcap")
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("shares")
                                  .Attr<bool>("rounded")
                                  .Attr<int64_t>("isa")
                                  .Attr<int64_t>("threads"));
