// The handlers of stoker_route, stoker_deal, stoker_combine and stoker_rms_norm: check every shape
// and size, then do it.
#include <limits>
#include <string>

#include "ffi.h"
#include "route.h"

namespace stoker {
namespace {

namespace ffi = xla::ffi;
using Floats = ffi::BufferR1<ffi::F32>;
using FloatRows = ffi::BufferR2<ffi::F32>;
using Ints = ffi::BufferR1<ffi::S32>;
using IntRows = ffi::BufferR2<ffi::S32>;

ffi::Error choose(ffi::ThreadPool threads, FloatRows logits, Floats bias,
                  ffi::Result<FloatRows> share, ffi::Result<IntRows> chosen, bool sigmoid,
                  bool normalise, int64_t groups, int64_t used_groups, int64_t group_top,
                  float scale, int64_t limit) {
  Route r{};
  r.T = logits.dimensions()[0];
  r.E = logits.dimensions()[1];
  r.count = share->dimensions()[1];
  const bool biased = bias.element_count() > 0;
  if (!has_shape(*share, {r.T, r.count}) || !has_shape(*chosen, {r.T, r.count}) ||
      (biased && !has_shape(bias, {r.E})) || r.E > std::numeric_limits<int32_t>::max()) {
    return ffi::Error::InvalidArgument("route: shapes do not match");
  }
  if (groups < 1 || groups > r.E || r.E % groups || used_groups < 1 || used_groups > groups ||
      group_top < 1 || group_top > r.E / groups || r.count < 1 ||
      r.count > used_groups * (r.E / groups)) {
    return ffi::Error::InvalidArgument("route: so many experts cannot be chosen so");
  }
  r.logits = logits.typed_data();
  r.bias = biased ? bias.typed_data() : nullptr;
  r.sigmoid = sigmoid;
  r.normalise = normalise;
  r.groups = groups;
  r.used_groups = used_groups;
  r.group_top = group_top;
  r.scale = scale;
  r.share = share->typed_data();
  r.chosen = chosen->typed_data();
  Crew pool = crew(threads, limit);
  route(pool, r);
  return ffi::Error::Success();
}

ffi::Error sort(IntRows chosen, ffi::BufferR0<ffi::S32> first, ffi::Result<Ints> row,
                ffi::Result<IntRows> place, ffi::Result<Ints> size) {
  Deal d{};
  d.T = chosen.dimensions()[0];
  d.count = chosen.dimensions()[1];
  d.held = size->dimensions()[0];
  if (!has_shape(*place, {d.T, d.count}) || !has_shape(*row, {d.T * d.count}) ||
      d.T * d.count > std::numeric_limits<int32_t>::max()) {
    return ffi::Error::InvalidArgument("deal: shapes do not match");
  }
  d.chosen = chosen.typed_data();
  d.first = *first.typed_data();
  d.row = row->typed_data();
  d.place = place->typed_data();
  d.size = size->typed_data();
  deal(d);
  return ffi::Error::Success();
}

ffi::Error sum_up(ffi::ThreadPool threads, FloatRows x, IntRows place, FloatRows share,
                  ffi::Result<FloatRows> out, int64_t isa, int64_t limit) {
  Combine c{};
  c.T = place.dimensions()[0];
  c.count = place.dimensions()[1];
  c.D = x.dimensions()[1];
  if (!has_shape(share, {c.T, c.count}) || !has_shape(*out, {c.T, c.D})) {
    return ffi::Error::InvalidArgument("combine: shapes do not match");
  }
  const Kernels* table = kernels(static_cast<Isa>(isa));
  if (!table) return ffi::Error::InvalidArgument("combine: instruction set not available");
  c.x = x.typed_data();
  c.place = place.typed_data();
  c.share = share.typed_data();
  c.out = out->typed_data();
  const int64_t rows = x.dimensions()[0];
  for (int64_t i = 0; i < c.T * c.count; ++i) {
    if (c.place[i] < 0 || c.place[i] >= rows) {
      return ffi::Error::InvalidArgument("combine: places must be 0 or more and below " +
                                         std::to_string(rows));
    }
  }
  Crew pool = crew(threads, limit);
  combine(pool, *table, c);
  return ffi::Error::Success();
}

ffi::Error norm(ffi::ThreadPool threads, FloatRows x, Floats weight, ffi::Result<FloatRows> out,
                float eps, int64_t isa, int64_t limit) {
  const int64_t T = x.dimensions()[0], D = x.dimensions()[1];
  if (!has_shape(weight, {D}) || !has_shape(*out, {T, D})) {
    return ffi::Error::InvalidArgument("rms_norm: shapes do not match");
  }
  const Kernels* table = kernels(static_cast<Isa>(isa));
  if (!table) return ffi::Error::InvalidArgument("rms_norm: instruction set not available");
  Crew pool = crew(threads, limit);
  rms_norm(pool, *table, x.typed_data(), weight.typed_data(), T, D, eps, out->typed_data());
  return ffi::Error::Success();
}

}  // namespace
}  // namespace stoker

XLA_FFI_DEFINE_HANDLER_SYMBOL(stoker_route, stoker::choose,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<stoker::FloatRows>()  // logits
                                  .Arg<stoker::Floats>()     // bias
                                  .Ret<stoker::FloatRows>()
                                  .Ret<stoker::IntRows>()
                                  .Attr<bool>("sigmoid")
                                  .Attr<bool>("normalise")
                                  .Attr<int64_t>("groups")
                                  .Attr<int64_t>("used_groups")
                                  .Attr<int64_t>("group_top")
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("threads"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(stoker_deal, stoker::sort,
                              xla::ffi::Ffi::Bind()
                                  .Arg<stoker::IntRows>()                   // chosen
                                  .Arg<xla::ffi::BufferR0<xla::ffi::S32>>()  // first
                                  .Ret<stoker::Ints>()
                                  .Ret<stoker::IntRows>()
                                  .Ret<stoker::Ints>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(stoker_combine, stoker::sum_up,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<stoker::FloatRows>()  // x
                                  .Arg<stoker::IntRows>()    // place
                                  .Arg<stoker::FloatRows>()  // share
                                  .Ret<stoker::FloatRows>()
                                  .Attr<int64_t>("isa")
                                  .Attr<int64_t>("threads"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(stoker_rms_norm, stoker::norm,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<stoker::FloatRows>()  // x
                                  .Arg<stoker::Floats>()     // weight
                                  .Ret<stoker::FloatRows>()
                                  .Attr<float>("eps")
                                  .Attr<int64_t>("isa")
                                  .Attr<int64_t>("threads"));
