// Attention over pages of every type, with values that are all equal: it must return them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "attention.h"
#include "harness.h"

namespace {

struct Sizes {
  int64_t N, K, H, Z, window;
  float softcap;
  Type type;
};

void check_attention(Random& random, const Kernels& table, const char* name, const Sizes& z) {
  const std::vector<int32_t> start{0, 1, 1, 54}, lens{300, -5, 590};
  const int64_t S = 3, T = 55, M = (600 + z.Z - 1) / z.Z, P = S * M + 1;
  std::vector<int32_t> pages(static_cast<size_t>(S * M));
  for (size_t i = 0; i < pages.size(); ++i) pages[i] = static_cast<int32_t>(pages.size() - i);
  const int64_t cells = P * z.Z * z.K * z.H;
  const bool codes = z.type == Type::kI8;
  const size_t width = z.type == Type::kF32 ? 4 : codes ? 1 : 2;
  Exact<uint8_t> k_pages(cells * static_cast<int64_t>(width));
  Exact<uint8_t> v_pages(cells * static_cast<int64_t>(width));
  Exact<float> k_scales(codes ? cells / z.H : 0), v_scales(codes ? cells / z.H : 0);
  for (int64_t i = 0; codes && i < cells / z.H; ++i) {
    k_scales.get()[i] = 0.01f;
    v_scales.get()[i] = 0.5f / 127;
  }
  const std::vector<float> q = random.reals(T * z.N * z.H);
  const std::vector<float> k = random.reals(T * z.K * z.H);
  const int64_t half = z.H / 3;  // the rest of a head is not turned
  const std::vector<float> cos = random.reals(T * half), sin = random.reals(T * half);
  // Equal values: whatever the weights, attention must return them.
  const std::vector<float> v(static_cast<size_t>(T * z.K * z.H), 0.5f);
  // So small that they take no share that a float can tell.
  const std::vector<float> sinks(static_cast<size_t>(z.N), -60.0f);
  for (int64_t i = 0; i < cells; ++i) {
    const float half = 0.5f;
    uint32_t bits;
    std::memcpy(&bits, &half, 4);
    const uint16_t top = static_cast<uint16_t>(bits >> 16);
    if (width == 4) std::memcpy(v_pages.get() + 4 * i, &half, 4);
    else if (width == 2) std::memcpy(v_pages.get() + 2 * i, &top, 2);
    else v_pages.get()[i] = 127;
  }
  for (const int64_t threads : {1, 3}) {
    const bool rounded = threads > 1;
    const double slack = rounded && z.type == Type::kBF16 ? 2e-3 : 2e-6;
    Exact<float> out(T * z.N * z.H);
    Threads pool(threads);
    const Attention a{q.data(), k.data(), v.data(), cos.data(), sin.data(), half, k_pages.get(), v_pages.get(),
                      codes ? k_scales.get() : nullptr, codes ? v_scales.get() : nullptr, z.type,
                      start.data(), lens.data(), pages.data(), T, z.N, z.K, z.H, S, M, P, z.Z,
                      z.window, z.softcap, 0.3f, 0, nullptr, 0.0f,
                      threads == 1 ? nullptr : sinks.data(), rounded, out.get()};
    const std::string problem = attend(pool, table, a);
    expect(problem.empty(), problem.c_str(), name, 0);
    double worst = 0;
    for (int64_t i = 0; i < T * z.N * z.H; ++i) {
      const double want = i < 54 * z.N * z.H ? 0.5 : 0.0;
      worst = std::max(worst, std::fabs(out.get()[i] - want));
    }
    expect(worst < slack, "attention", name, worst);
    // Thirds of longer pages: what a third gives is the value, or nothing where a row sees none.
    std::vector<bool> seen(static_cast<size_t>(54 * z.N));
    for (int64_t share = 0; share < 3; ++share) {
      Exact<float> some(T * z.N * z.H), lse(T * z.N);
      Attention third = a;
      third.share = share, third.shares = 3, third.sinks = nullptr;
      third.out = some.get(), third.lse = lse.get();
      expect(attend(pool, table, third).empty(), "part of attention", name, 0);
      worst = 0;
      for (int64_t i = 0; i < T * z.N * z.H; ++i) {
        const bool any = lse.get()[i / z.H] > kNothing;
        if (any) seen[static_cast<size_t>(i / z.H)] = true;
        worst = std::max(worst, std::fabs(some.get()[i] - 0.5 * any));
      }
      expect(worst < slack, "part of attention", name, worst);
    }
    expect(std::count(seen.begin(), seen.end(), false) == 0, "all parts", name, 0);
    if (codes) continue;
    // The values as keys, of one head; those of other heads are pages that nobody reads. What the
    // norm makes ones is halved by its weight, and what is turned means nothing.
    Exact<float> latent(T * z.N * z.H);
    Exact<uint8_t> vectors(cells * static_cast<int64_t>(width));
    std::memcpy(vectors.get(), v_pages.get(), static_cast<size_t>(cells) * width);
    Attention one = a;
    one.K = 1, one.k_pages = nullptr;
    one.rank = z.H - 2 * half;
    one.norm = v.data();
    one.v_pages = vectors.get();
    one.sinks = nullptr, one.out = latent.get();
    expect(attend(pool, table, one).empty(), "latent attention", name, 0);
    worst = 0;
    for (int64_t i = 0; i < 54 * z.N * z.H; ++i) {
      if (i % z.H < one.rank) worst = std::max(worst, std::fabs(latent.get()[i] - 0.5));
    }
    expect(worst < slack, "latent attention", name, worst);
  }
}

}  // namespace
