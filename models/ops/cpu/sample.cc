// Each row is one unit of work. A pass over it skips the blocks whose largest logit is below what
// is looked for, which is most of them once a filter has narrowed the choice.
#include "sample.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

namespace stoker {
namespace {

constexpr int64_t kBlock = 512;  // logits whose sum is one float32
constexpr int64_t kFew = 256;    // logits that are sorted rather than counted
constexpr double kLog2E = 1.4426950408889634;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

class Row {
 public:
  Row(const Kernels& kernels, const float* x, int64_t width)
      : k_(kernels),
        x_(x),
        width_(width),
        peaks_(static_cast<size_t>((width + kBlock - 1) / kBlock)) {
    float bad = 0;
    peak_ = -kInfinity;
    for (int64_t b = 0; b < blocks(); ++b) {
      float poison;
      peaks_[static_cast<size_t>(b)] = k_.peak(start(b), size(b), &poison);
      peak_ = std::max(peak_, peaks_[static_cast<size_t>(b)]);
      bad += poison;
    }
    poisoned_ = !(bad == 0.0f);
  }

  // Whether the row holds NaN or +inf.
  bool poisoned() const { return poisoned_; }

  // The first of the largest; 0 where all are -inf.
  int32_t best() const {
    for (int64_t b = 0; b < blocks(); ++b) {
      if (peaks_[static_cast<size_t>(b)] != peak_) continue;
      for (int64_t i = 0; i < size(b); ++i) {
        if (start(b)[i] == peak_) return static_cast<int32_t>(b * kBlock + i);
      }
    }
    return 0;
  }

  // log of the sum of all exponentials.
  float total() const {
    return static_cast<float>(peak_ + std::log(Scale(*this, 1).from(-kInfinity).mass));
  }

  // The token at share `uniform` of the kept weights.
  int32_t draw(float temperature, int64_t top_k, float top_p, float min_p, float uniform) const {
    const Scale scale(*this, temperature);
    const float least = scale.clip(threshold(scale, top_k, top_p, min_p));
    std::vector<double> sums(peaks_.size());
    double all = 0;
    for (int64_t b = 0; b < blocks(); ++b) {
      float count;
      if (reaches(b, least)) all += k_.mass(start(b), size(b), least, peak_, scale.rate, &count);
      sums[static_cast<size_t>(b)] = all;
    }
    const double target = uniform * all;
    const auto above = std::upper_bound(sums.begin(), sums.end(), target);
    if (above == sums.end()) return best();
    const int64_t b = above - sums.begin();
    float weights[kBlock];
    k_.weigh(start(b), size(b), least, peak_, scale.rate, weights);
    double sum = b == 0 ? 0 : sums[static_cast<size_t>(b - 1)];
    int64_t last = 0;
    for (int64_t i = 0; i < size(b); ++i) {
      if (weights[i] <= 0) continue;
      last = i;
      sum += weights[i];
      if (sum > target) break;
    }
    return static_cast<int32_t>(b * kBlock + last);
  }

  // The `count` largest, falling, of equal ones those that come first.
  std::vector<std::pair<float, int32_t>> largest(int64_t count) const {
    std::vector<std::pair<float, int32_t>> found;
    const float least = search(Scale(*this, 1), false, static_cast<double>(count), -kInfinity);
    for_each(least, [&](float x, int64_t id) { found.emplace_back(-x, static_cast<int32_t>(id)); });
    const auto end = found.begin() + std::min<int64_t>(count, static_cast<int64_t>(found.size()));
    std::partial_sort(found.begin(), end, found.end());
    found.erase(end, found.end());
    for (auto& [value, id] : found) value = -value;
    return found;
  }

 private:
  // Logits from `at` on: how many, and what they weigh.
  struct Level {
    float at;
    double count;
    double mass;
    double quantity(bool weighed) const { return weighed ? mass : count; }
  };

  // The row at a temperature.
  struct Scale {
    Scale(const Row& row, float temperature)
        : row(row), temperature(temperature), rate(static_cast<float>(kLog2E / temperature)) {}

    // At least `least`, and where weights are still above 2^-125.
    float clip(float least) const { return std::max(least, row.peak_ - 86 * temperature); }

    Level from(float least) const {
      Level level{least, 0, 0};
      const float clipped = clip(least);
      for (int64_t b = 0; b < row.blocks(); ++b) {
        if (!row.reaches(b, clipped)) continue;
        float count;
        level.mass += row.k_.mass(row.start(b), row.size(b), clipped, row.peak_, rate, &count);
        level.count += count;
      }
      return level;
    }

    Level counted(float least) const {
      Level level{least, 0, 0};
      for (int64_t b = 0; b < row.blocks(); ++b) {
        if (row.reaches(b, least)) level.count += row.k_.tally(row.start(b), row.size(b), least);
      }
      return level;
    }

    const Row& row;
    float temperature;
    float rate;
  };

  int64_t blocks() const { return static_cast<int64_t>(peaks_.size()); }
  const float* start(int64_t b) const { return x_ + b * kBlock; }
  int64_t size(int64_t b) const { return std::min(kBlock, width_ - b * kBlock); }
  bool reaches(int64_t b, float least) const { return peaks_[static_cast<size_t>(b)] >= least; }

  // body(logit, id) for each logit that is at least `least`, in order of id.
  template <typename Body>
  void for_each(float least, Body body) const {
    int32_t places[kBlock];
    for (int64_t b = 0; b < blocks(); ++b) {
      if (!reaches(b, least)) continue;
      const int64_t n = k_.find(start(b), size(b), least, places);
      for (int64_t i = 0; i < n; ++i) body(start(b)[places[i]], b * kBlock + places[i]);
    }
  }

  // The least logit that the filters keep.
  float threshold(const Scale& scale, int64_t top_k, float top_p, float min_p) const {
    float least = -kInfinity;
    if (top_k > 0 && top_k < width_) {
      least = search(scale, false, static_cast<double>(top_k), least);
    }
    if (top_p < 1) least = search(scale, true, top_p * scale.from(least).mass, least);
    if (min_p > 0) least = std::max(least, peak_ + scale.temperature * std::log(min_p));
    return std::min(least, peak_);
  }

  // The largest logit t such that those from t on, by number or weight, reach `wanted`; at least
  // `lowest`, from which on they do. -inf where it takes those that weigh nothing.
  float search(const Scale& scale, bool weighed, double wanted, float lowest) const {
    const auto level = [&](float at) { return weighed ? scale.from(at) : scale.counted(at); };
    Level high = level(peak_), low = high;
    if (high.quantity(weighed) >= wanted) return peak_;
    // Few weigh much: look close to the peak first, where a pass is cheap.
    for (float step = 1;; step += step) {
      if (step > 128) return lowest;
      low = level(std::max(lowest, peak_ - step * scale.temperature));
      if (low.quantity(weighed) >= wanted || low.at == lowest) break;
      high = low;
    }
    while (low.count - high.count > static_cast<double>(kFew)) {
      const float at = low.at + (high.at - low.at) / 2;
      if (!(low.at < at && at < high.at)) return low.at;  // all that are left are equal
      const Level middle = level(at);
      (middle.quantity(weighed) >= wanted ? low : high) = middle;
    }
    return walk(scale, weighed, wanted, low, high);
  }

  // The same among the few logits from `low` on and below `high`.
  float walk(const Scale& scale, bool weighed, double wanted, const Level& low,
             const Level& high) const {
    float found[kFew], weights[kFew];
    int64_t n = 0;
    for_each(low.at, [&](float x, int64_t) {
      if (x < high.at && n < kFew) found[n++] = x;
    });
    std::sort(found, found + n, std::greater<float>());
    if (weighed) k_.weigh(found, n, scale.clip(low.at), peak_, scale.rate, weights);
    double sum = high.quantity(weighed);
    for (int64_t i = 0; i < n; ++i) {
      sum += weighed ? weights[i] : 1;
      if (sum >= wanted) return found[i];
    }
    return low.at;
  }

  const Kernels& k_;
  const float* x_;
  int64_t width_;
  std::vector<float> peaks_;  // the largest of each block
  float peak_;
  bool poisoned_;
};

}  // namespace

namespace {

// log of the summed exponentials; NaN where the row means nothing.
float total_of(const Row& row) {
  return row.poisoned() ? std::numeric_limits<float>::quiet_NaN() : row.total();
}

}  // namespace

void sample(Pool& pool, const Kernels& kernels, const Sample& s) {
  parallel_for(pool, s.B, [&](int64_t r) {
    const int64_t slot = std::clamp<int64_t>(s.slots[r], 0, s.S - 1);
    const float* logits = s.logits + r * s.V;
    const auto choose = [&](const Row& row) {
      if (row.poisoned() || !(s.temperature[slot] > 0)) return row.best();
      return row.draw(s.temperature[slot], s.top_k[slot], s.top_p[slot], s.min_p[slot],
                      s.uniform[r]);
    };
    const Row row(kernels, logits, s.V);
    s.total[r] = total_of(row);
    if (!wants_edits(s.edits, slot, s.positions[r])) {
      s.token[r] = choose(row);
      return;
    }
    // The copy stays in the second cache; those of all rows would not.
    const std::unique_ptr<float[]> edited(new float[static_cast<size_t>(s.V)]);
    std::copy(logits, logits + s.V, edited.get());
    edit(s.edits, slot, s.positions[r], edited.get(), s.V);
    s.token[r] = choose(Row(kernels, edited.get(), s.V));
  });
}

void logsumexp(Pool& pool, const Kernels& kernels, const float* logits, int64_t B, int64_t V,
               float* total) {
  parallel_for(pool, B, [&](int64_t r) { total[r] = total_of(Row(kernels, logits + r * V, V)); });
}

void largest(Pool& pool, const Kernels& kernels, const Largest& l) {
  parallel_for(pool, l.B, [&](int64_t r) {
    std::vector<std::pair<float, int32_t>> found;
    if (l.wanted[r]) {
      const Row row(kernels, l.logits + r * l.V, l.V);
      if (!row.poisoned()) found = row.largest(l.count);
    }
    found.resize(static_cast<size_t>(l.count), {-kInfinity, -1});
    for (int64_t i = 0; i < l.count; ++i) {
      l.value[r * l.count + i] = found[static_cast<size_t>(i)].first;
      l.id[r * l.count + i] = found[static_cast<size_t>(i)].second;
    }
  });
}

}  // namespace stoker
