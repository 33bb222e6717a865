// Each row is computed by one thread, in one order of operations, whatever the rows beside it.
#include "route.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace stoker {
namespace {

constexpr int64_t kSerialElements = 12 << 10;  // fewer are not worth a second thread
constexpr int64_t kSerialScores = 2 << 10;     // likewise, with an exponential for each
constexpr float kEpsilon = 1e-20f;             // what a sum of shares is kept above
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Calls body(t0, t1) for ranges of rows that cover [0, T), of about `serial` elements of `each`.
template <typename Body>
void for_rows(Pool& pool, int64_t T, int64_t each, int64_t serial, const Body& body) {
  const int64_t range = std::max<int64_t>(1, serial / std::max<int64_t>(1, each));
  parallel_for(pool, (T + range - 1) / range, [&](int64_t unit) {
    body(unit * range, std::min(T, (unit + 1) * range));
  });
}

// e^x for x up to 0, or zero where shares of it would be too small for a normal float.
float exponential(float x) { return x < -80.0f ? 0.0f : std::exp(x); }

void softmax(const float* x, int64_t n, float* out) {
  float peak = -kInfinity, total = 0;
  for (int64_t i = 0; i < n; ++i) peak = std::max(peak, x[i]);
  for (int64_t i = 0; i < n; ++i) total += out[i] = exponential(x[i] - peak);
  for (int64_t i = 0; i < n; ++i) out[i] /= total;
}

void sigmoid(const float* x, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) {
    // Of the magnitude, so that nothing overflows.
    const float small = exponential(-std::fabs(x[i]));
    out[i] = (x[i] < 0 ? small : 1.0f) / (1.0f + small);
  }
}

// NaN is above all numbers, so that it is chosen, and the row shows it.
bool above(float a, float b) { return a > b || (std::isnan(a) && !std::isnan(b)); }

// The `count` largest of x [n], falling; of equal ones the first.
void largest(const float* x, int64_t n, int64_t count, int32_t* ids) {
  for (int64_t i = 0; i < n; ++i) {
    int64_t at = std::min(i, count);
    if (at == count && !above(x[i], x[ids[count - 1]])) continue;
    for (at = std::min(at, count - 1); at > 0 && above(x[i], x[ids[at - 1]]); --at) {
      ids[at] = ids[at - 1];
    }
    ids[at] = static_cast<int32_t>(i);
  }
}

// One row's choices, with room for what lies between.
class Chooser {
 public:
  explicit Chooser(const Route& r)
      : r_(r),
        score_(static_cast<size_t>(r.E)),
        ranked_(static_cast<size_t>(r.E)),
        best_(static_cast<size_t>(r.groups)),
        ids_(static_cast<size_t>(std::max(r.used_groups, r.group_top))) {}

  void choose(int64_t t) {
    const float* x = r_.logits + t * r_.E;
    (r_.sigmoid ? sigmoid : softmax)(x, r_.E, score_.data());
    for (int64_t e = 0; e < r_.E; ++e) {
      const size_t i = static_cast<size_t>(e);
      ranked_[i] = r_.bias ? score_[i] + r_.bias[e] : score_[i];
    }
    if (r_.used_groups < r_.groups) drop_groups();
    float* share = r_.share + t * r_.count;
    int32_t* chosen = r_.chosen + t * r_.count;
    largest(ranked_.data(), r_.E, r_.count, chosen);
    float total = 0;
    for (int64_t j = 0; j < r_.count; ++j) {
      total += share[j] = score_[static_cast<size_t>(chosen[j])];
    }
    const float divisor = r_.normalise ? total + kEpsilon : 1.0f;
    for (int64_t j = 0; j < r_.count; ++j) share[j] = share[j] / divisor * r_.scale;
  }

 private:
  // -inf for all experts outside the best groups.
  void drop_groups() {
    const int64_t each = r_.E / r_.groups;
    for (int64_t g = 0; g < r_.groups; ++g) {
      const float* members = ranked_.data() + g * each;
      largest(members, each, r_.group_top, ids_.data());
      float total = 0;
      for (int64_t j = 0; j < r_.group_top; ++j) total += members[ids_[static_cast<size_t>(j)]];
      best_[static_cast<size_t>(g)] = total;
    }
    largest(best_.data(), r_.groups, r_.used_groups, ids_.data());
    for (int64_t g = 0; g < r_.groups; ++g) {
      const auto end = ids_.begin() + r_.used_groups;
      if (std::find(ids_.begin(), end, static_cast<int32_t>(g)) != end) continue;
      std::fill_n(ranked_.begin() + g * each, each, -kInfinity);
    }
  }

  const Route& r_;
  std::vector<float> score_, ranked_, best_;
  std::vector<int32_t> ids_;
};

}  // namespace

void route(Pool& pool, const Route& r) {
  for_rows(pool, r.T, r.E, kSerialScores, [&](int64_t t0, int64_t t1) {
    Chooser chooser(r);
    for (int64_t t = t0; t < t1; ++t) chooser.choose(t);
  });
}

void deal(const Deal& d) {
  const int64_t pairs = d.T * d.count;
  const auto bin = [&](int64_t i) {
    const int64_t own = d.chosen[i] - d.first;
    return static_cast<size_t>(own < 0 || own >= d.held ? d.held : own);
  };
  std::vector<int32_t> next(static_cast<size_t>(d.held) + 2);  // where each bin starts
  for (int64_t i = 0; i < pairs; ++i) ++next[bin(i) + 1];
  std::copy_n(next.begin() + 1, d.held, d.size);
  for (size_t e = 1; e < next.size(); ++e) next[e] += next[e - 1];
  for (int64_t i = 0; i < pairs; ++i) {
    const int32_t at = next[bin(i)]++;
    d.place[i] = at;
    d.row[at] = static_cast<int32_t>(i / d.count);
  }
}

void combine(Pool& pool, const Kernels& kernels, const Combine& c) {
  for_rows(pool, c.T, c.D * c.count, kSerialElements, [&](int64_t t0, int64_t t1) {
    std::vector<const float*> rows(static_cast<size_t>(c.count));
    for (int64_t t = t0; t < t1; ++t) {
      const int32_t* place = c.place + t * c.count;
      for (size_t j = 0; j < rows.size(); ++j) rows[j] = c.x + place[j] * c.D;
      kernels.mix(rows.data(), c.share + t * c.count, c.count, c.D, c.out + t * c.D);
    }
  });
}

void rms_norm(Pool& pool, const Kernels& kernels, const float* x, const float* weight, int64_t T,
              int64_t D, float eps, float* out) {
  for_rows(pool, T, D, kSerialElements, [&](int64_t t0, int64_t t1) {
    for (int64_t t = t0; t < t1; ++t) kernels.rms_norm(x + t * D, weight, D, eps, out + t * D);
  });
}

}  // namespace stoker
