// Penalties visit the tokens that a history holds, not the vocabulary: these are counted in a hash
// table of the history's size, which stays in the first caches.
#include "edit.h"

#include <algorithm>
#include <limits>
#include <vector>

namespace stoker {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kWord = 32;

bool has_bias(const Edits& e, int64_t slot) { return e.N > 0 && e.bias_ids[slot * e.N] >= 0; }

bool has_penalty(const Edits& e, int64_t slot) {
  return e.repetition[slot] != 1 || e.presence[slot] != 0 || e.frequency[slot] != 0;
}

bool has_closed_ends(const Edits& e, int64_t slot, int64_t position) {
  return position < e.min_lens[slot] && e.E > 0 && e.end_ids[slot * e.E] >= 0;
}

void add_bias(const Edits& e, int64_t slot, float* logits, int64_t V) {
  for (int64_t i = slot * e.N; i < (slot + 1) * e.N; ++i) {
    const int64_t id = e.bias_ids[i];
    if (id >= 0 && id < V) logits[id] += e.bias_values[i];
  }
}

// Distinct tokens, and how often each was said.
class Tally {
 public:
  // Holds up to `most` distinct tokens, at most half full.
  explicit Tally(int64_t most) : places_(static_cast<size_t>(most) + 1) {
    while ((int64_t{1} << bits_) < 2 * most) ++bits_;
    entries_.resize(size_t{1} << bits_, {-1, 0});
  }

  void add(int32_t token, int32_t said) {
    const size_t mask = entries_.size() - 1;
    // Fibonacci hashing (Knuth, The Art of Computer Programming 3, 6.4) and linear probing.
    size_t at = (static_cast<uint32_t>(token) * uint64_t{0x9E3779B9} & 0xFFFFFFFF) >> (32 - bits_);
    while (entries_[at].token != token && entries_[at].token >= 0) at = (at + 1) & mask;
    // No branch: whether a token is new, no processor can foretell.
    places_[size_] = at;
    size_ += entries_[at].token != token;
    entries_[at] = {token, entries_[at].said + said};
  }

  // In the order in which they first came.
  template <typename Body>
  void for_each(Body body) const {
    for (size_t i = 0; i < size_; ++i) body(entries_[places_[i]].token, entries_[places_[i]].said);
  }

 private:
  struct Entry {
    int32_t token, said;
  };
  int bits_ = 4;
  std::vector<Entry> entries_;
  std::vector<size_t> places_;  // of the distinct tokens, and room for one that is not new
  size_t size_ = 0;
};

void penalise(const Edits& e, int64_t slot, int64_t position, float* logits, int64_t V) {
  const float repetition = e.repetition[slot];  // 1 changes no bit
  const float presence = e.presence[slot], frequency = e.frequency[slot];
  const int32_t* history = e.history + slot * e.C;
  const int64_t end = std::clamp<int64_t>(position, 0, e.C);
  const int64_t reply = std::clamp<int64_t>(e.prompt_lens[slot], 0, end);
  const int64_t start = repetition != 1 ? 0 : reply;
  Tally tally(std::min(end - start, V));
  for (int64_t i = start; i < end; ++i) {
    if (history[i] >= 0 && history[i] < V) tally.add(history[i], i >= reply);
  }
  tally.for_each([&](int32_t token, int32_t said) {
    float x = logits[token];
    const float longer = x * repetition, shorter = x / repetition;
    x = x < 0 ? longer : shorter;
    if (said > 0) x = x - frequency * static_cast<float>(said) - presence;
    logits[token] = x;
  });
}

void ban(const Edits& e, int64_t slot, int64_t position, float* logits, int64_t V) {
  const int64_t W = (V + kWord - 1) / kWord;
  const uint32_t* all = e.allowed + slot * W;
  std::vector<uint32_t> open(all, all + W);
  if (has_closed_ends(e, slot, position)) {
    for (int64_t i = slot * e.E; i < (slot + 1) * e.E; ++i) {
      const int64_t id = e.end_ids[i];
      if (id >= 0 && id < V) open[static_cast<size_t>(id / kWord)] &= ~(uint32_t{1} << id % kWord);
    }
    // Something must be generated: where only ends may be, they may.
    if (std::none_of(open.begin(), open.end(), [](uint32_t word) { return word != 0; })) {
      open.assign(all, all + W);
    }
  }
  for (int64_t w = 0; w < W; ++w) {
    const uint32_t word = open[static_cast<size_t>(w)];
    if (word == ~uint32_t{0}) continue;
    const int64_t first = w * kWord, n = std::min(kWord, V - first);
    for (int64_t i = 0; i < n; ++i) {
      logits[first + i] = word >> i & 1 ? logits[first + i] : -kInfinity;
    }
  }
}

}  // namespace

bool wants_edits(const Edits& e, int64_t slot, int64_t position) {
  return has_bias(e, slot) || has_penalty(e, slot) || e.has_mask[slot] ||
         has_closed_ends(e, slot, position);
}

void edit(const Edits& e, int64_t slot, int64_t position, float* logits, int64_t V) {
  if (has_bias(e, slot)) add_bias(e, slot, logits, V);
  if (has_penalty(e, slot)) penalise(e, slot, position, logits, V);
  if (e.has_mask[slot] || has_closed_ends(e, slot, position)) ban(e, slot, position, logits, V);
}

}  // namespace stoker
