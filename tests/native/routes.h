// The choice of experts, the order of rows and their sums, against plain loops.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include "harness.h"
#include "route.h"

namespace {

// Of T rows, of which one holds a NaN: the choices are the best of a sorted list, and all rows of
// experts, each of one value, sum to what shares and values say.
void check_experts(Random& random, const Kernels& table, const char* name) {
  const int64_t T = 70, E = 60, D = 37, bad = 5;
  Exact<float> logits(T * E), bias(E);
  for (int64_t i = 0; i < T * E; ++i) logits.get()[i] = 3 * random.real();
  for (int64_t e = 0; e < E; ++e) bias.get()[e] = random.real();
  logits.get()[bad * E + 7] = std::numeric_limits<float>::quiet_NaN();
  for (const int64_t groups : {1, 4}) {
    for (const int64_t count : {1, 6}) {
      for (const bool sigmoid : {false, true}) {
        Exact<float> share(T * count), out(T * D);
        Exact<int32_t> chosen(T * count), row(T * count), place(T * count), size(E / 2);
        Threads pool(3);
        route(pool, {logits.get(), sigmoid ? bias.get() : nullptr, T, E, count, sigmoid, true,
                     groups, std::min<int64_t>(groups, 2), 2, 1.5f, share.get(), chosen.get()});
        for (int64_t t = 0; t < T; ++t) {
          const int32_t* own = chosen.get() + t * count;
          const float* x = logits.get() + t * E;
          const auto rank = [&](int64_t e) {
            return sigmoid ? 1 / (1 + std::exp(-static_cast<double>(x[e]))) + bias.get()[e] : x[e];
          };
          int64_t above = 0, level = 0;  // than the last that was chosen; scores may be equal
          float total = 0;
          for (int64_t j = 0; j < count; ++j) {
            total += share.get()[t * count + j];
            expect(own[j] >= 0 && own[j] < E, "expert in range", name, own[j]);
            expect(std::count(own, own + count, own[j]) == 1, "experts once", name, own[j]);
          }
          for (int64_t e = 0; e < E; ++e) {
            const double difference = rank(e) - rank(own[count - 1]);
            above += difference > 1e-6;
            level += std::fabs(difference) <= 1e-6;
          }
          if (t == bad) {
            expect(std::isnan(total) || sigmoid, "NaN shows", name, total);
            continue;
          }
          const bool best = above < count && above + level >= count;
          expect(best || groups > 1, "best experts", name, static_cast<double>(above));
          expect(std::fabs(total - 1.5f) < 1e-5f, "shares", name, total);
        }
        // Half of the experts, from the twentieth on.
        deal({chosen.get(), T, count, 20, E / 2, row.get(), place.get(), size.get()});
        const int64_t held = std::accumulate(size.get(), size.get() + E / 2, int64_t{0});
        int64_t found = 0;
        Exact<float> x(T * count * D);
        for (int64_t i = 0; i < T * count; ++i) {
          const int32_t at = place.get()[i], expert = chosen.get()[i];
          const bool own = expert >= 20 && expert < 20 + E / 2;
          found += own;
          expect(row.get()[at] == i / count && own == (at < held), "order", name, at);
          std::fill_n(x.get() + at * D, D, static_cast<float>(expert));
        }
        expect(found == held, "sizes", name, static_cast<double>(held));
        combine(pool, table, {x.get(), place.get(), share.get(), T, count, D, out.get()});
        for (int64_t t = 0; t < T; ++t) {
          double want = 0;
          for (int64_t j = t * count; j < (t + 1) * count; ++j) {
            want += static_cast<double>(share.get()[j]) * chosen.get()[j];
          }
          const float last = out.get()[t * D + D - 1];
          if (t != bad) expect(std::fabs(last - want) < 1e-3, "sum of rows", name, last);
        }
      }
    }
  }
  Exact<float> normed(T * E), weight(E);
  std::fill_n(weight.get(), E, 2.0f);
  {
    Threads pool(3);
    rms_norm(pool, table, logits.get(), weight.get(), T, E, 0.0f, normed.get());
  }
  double squares = 0;
  for (int64_t e = 0; e < E; ++e) squares += normed.get()[e] * normed.get()[e];
  expect(std::fabs(squares - 4.0 * E) < 1e-2, "rms_norm", name, squares);
}

}  // namespace
