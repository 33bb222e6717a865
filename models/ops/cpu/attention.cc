#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace stoker {
namespace {

constexpr int64_t kSerialFloats = 3 << 10;  // appended by the caller alone
constexpr int64_t kAhead = 4;                // blocks of keys to ask for before a task begins

// For each of `heads` KV heads from `head` on, rows [first, first + rows) of the slot's queries
// times the query heads that share it.
struct Task {
  int64_t slot, head, heads, first, rows;
  int64_t span0, span1;  // spans that some row sees
  size_t partial;        // where the partial results of its spans start, in rows

  int64_t all_rows() const { return heads * rows; }
};

int64_t queries(const Attention& a, int64_t slot) {
  return a.query_start[slot + 1] - a.query_start[slot];
}

int64_t position(const Attention& a, int64_t slot, int64_t query) {
  return a.kv_lens[slot] - queries(a, slot) + query;
}

int64_t first_seen(const Attention& a, int64_t pos) {
  return a.window > 0 ? std::max<int64_t>(0, pos - a.window + 1) : 0;
}

// How many of a sequence's first `n` tokens these pages hold. What follows counts tokens of a slot
// as they lie in its pages; positions are those of the sequence.
int64_t held(const Attention& a, int64_t n) {
  if (a.shares == 1) return n;
  const int64_t whole = a.shares * a.Z;
  return n / whole * a.Z + std::clamp<int64_t>(n % whole - a.share * a.Z, 0, a.Z);
}

int64_t length(const Attention& a, int64_t slot) { return held(a, a.kv_lens[slot]); }

// The tokens that the row at `pos` sees: [low, high).
int64_t low_seen(const Attention& a, int64_t pos) { return held(a, first_seen(a, pos)); }
int64_t high_seen(const Attention& a, int64_t pos) { return held(a, pos + 1); }

std::string check(const Attention& a) {
  for (int64_t s = 0; s < a.S; ++s) {
    const int64_t from = a.query_start[s], to = a.query_start[s + 1];
    const std::string slot = "slot " + std::to_string(s);
    if (from < 0 || to < from || to > a.T) {
      return slot + " owns rows " + std::to_string(from) + ":" + std::to_string(to) + " of " +
             std::to_string(a.T) + "; query_start must rise from 0 to at most T";
    }
    if (to == from) continue;
    const int64_t tokens = a.kv_lens[s], most = a.M * a.Z * a.shares;
    if (tokens < to - from || tokens > most) {
      return slot + " has " + std::to_string(tokens) + " cached tokens; it needs at least its " +
             std::to_string(to - from) + " rows and at most " + std::to_string(most);
    }
    for (int64_t m = low_seen(a, tokens - (to - from)) / a.Z; m * a.Z < length(a, s); ++m) {
      const int32_t page = a.page_table[s * a.M + m];
      if (page < 0 || page >= a.P) {
        return "page " + std::to_string(page) + " of " + slot + " is outside the pool of " +
               std::to_string(a.P) + " pages";
      }
    }
  }
  return "";
}

// Elements of one head of a page.
int64_t head_step(const Attention& a) { return a.Z * a.H; }

// Elements before head 0 of the page with the slot's token `at`.
int64_t page_offset(const Attention& a, int64_t slot, int64_t at) {
  return a.page_table[slot * a.M + at / a.Z] * a.K * head_step(a);
}

// Scales before head 0 of the page with the slot's token `at`.
int64_t scale_offset(const Attention& a, int64_t slot, int64_t at) {
  return a.page_table[slot * a.M + at / a.Z] * a.K * a.Z;
}

template <typename T>
void spread(const T* from, int64_t n, T* to, int64_t step) {
  for (int64_t i = 0; i < n; ++i) to[i * step] = from[i];
}

// The vector x [H] into elements `at`, `at + step` and so on of the pages; its scale, of codes,
// into `scale`.
void put(const Kernels& k, const Attention& a, const float* x, void* pages, int64_t at,
         int64_t step, float* scale) {
  if (a.type == Type::kF32) {
    spread(x, a.H, static_cast<float*>(pages) + at, step);
  } else if (a.type == Type::kBF16) {
    uint16_t narrow[kMaxHead];
    k.store_bf16(x, a.H, narrow);
    spread(narrow, a.H, static_cast<uint16_t*>(pages) + at, step);
  } else {
    int8_t codes[kMaxHead];
    *scale = k.quantize_row(x, a.H, codes);
    spread(codes, a.H, static_cast<int8_t*>(pages) + at, step);
  }
}

void append(const Kernels& k, const Attention& a, int64_t slot, int64_t query) {
  const int64_t row = a.query_start[slot] + query, pos = position(a, slot, query);
  const int64_t token = held(a, pos);
  if (held(a, pos + 1) == token) return;  // another share's
  const int64_t to = page_offset(a, slot, token), offset = token % a.Z;
  alignas(64) float turned[kMaxHead];
  if (!a.k_pages) {
    const float* vector = a.v + row * a.H;
    if (a.norm) {
      k.rms_norm(vector, a.norm, a.rank, a.eps, turned);
    } else {
      std::memcpy(turned, vector, static_cast<size_t>(a.rank) * sizeof(float));
    }
    k.rotate(vector + a.rank, a.cos + row * a.half, a.sin + row * a.half, a.half, a.H - a.rank, 1.0f,
             turned + a.rank);
    put(k, a, turned, a.v_pages, to + offset * a.H, 1, nullptr);
    return;
  }
  for (int64_t head = 0; head < a.K; ++head) {
    const int64_t from = (row * a.K + head) * a.H, at = to + head * head_step(a);
    const int64_t cell = scale_offset(a, slot, token) + head * a.Z + offset;
    k.rotate(a.k + from, a.cos + row * a.half, a.sin + row * a.half, a.half, a.H, 1.0f, turned);
    put(k, a, turned, a.k_pages, at + offset, a.Z, a.k_scales ? a.k_scales + cell : nullptr);
    put(k, a, a.v + from, a.v_pages, at + offset * a.H, 1,
        a.v_scales ? a.v_scales + cell : nullptr);
  }
}

// One task at work: its scaled queries, and where results go.
struct Worker {
  const Kernels& k;
  const Attention& a;
  const Task& task;
  alignas(64) float q[kQueryFloats];

  // Leaves q as it is: to clear it would take as long as a short context.
  Worker(const Kernels& k, const Attention& a, const Task& task) : k(k), a(a), task(task) {}

  int64_t group() const { return a.N / a.K; }
  // The flat row of the task's row r (counted through its heads).
  int64_t flat(int64_t r) const {
    return a.query_start[task.slot] + (task.first + r % task.rows) / group();
  }
  // Elements before it in q and out.
  int64_t place(int64_t r) const {
    const int64_t head = task.head + r / task.rows, row = task.first + r % task.rows;
    return (flat(r) * a.N + head * group() + row % group()) * a.H;
  }

  void load_queries() {
    for (int64_t r = 0; r < task.all_rows(); ++r) {
      const int64_t turn = flat(r) * a.half;
      const float* from = a.q + place(r);
      float* to = q + r * a.H;
      if (a.rank > 0) k.scale(from, a.scale, a.rank, to);
      k.rotate(from + a.rank, a.cos + turn, a.sin + turn, a.half, a.H - a.rank, a.scale, to + a.rank);
    }
  }

  // The first keys that some row sees of span `index`: pointers to the blocks, and their number.
  int64_t first_keys(int64_t index, const void** blocks) const {
    const int64_t seen = low_seen(a, position(a, task.slot, task.first / group()));
    const int64_t start = std::max(index * kSpan, seen / kKeys * kKeys);
    const int64_t last = std::min(length(a, task.slot), (index + 1) * kSpan);
    const int64_t end = std::min<int64_t>(last, start + kAhead * kKeys);
    for (int64_t at = start; at < end; at += kKeys) *blocks++ = key_block(at);
    return std::max<int64_t>(0, end - start);
  }

  const void* key_block(int64_t token) const {
    if (!a.k_pages) return value_block(token);
    const int64_t at = page_offset(a, task.slot, token) + task.head * head_step(a) + token % a.Z;
    return static_cast<const char*>(a.k_pages) + at * width(a.type);
  }
  const void* value_block(int64_t token) const {
    const int64_t at =
        page_offset(a, task.slot, token) + task.head * head_step(a) + token % a.Z * a.H;
    return static_cast<const char*>(a.v_pages) + at * width(a.type);
  }
  const float* scale_block(const float* scales, int64_t token) const {
    return scales + scale_offset(a, task.slot, token) + task.head * a.Z + token % a.Z;
  }

  bool rounds() const {
    return a.rounded && a.type == Type::kBF16 && a.H % 2 == 0 && k.attend_rounded;
  }

  // `then`: what this thread will probably do after it.
  void span(int64_t index, float* peak, float* total, float* out, const Worker* then,
            int64_t then_index) const {
    constexpr int64_t kBlocks = kSpan / kKeys;
    const void *keys[kBlocks], *values[kBlocks], *next[kAhead];
    const float *k_scales[kBlocks], *v_scales[kBlocks];
    const bool codes = a.type == Type::kI8;
    const int64_t next_keys = then ? then->first_keys(then_index, next) : 0;
    int32_t low[kMaxQueries], high[kMaxQueries];
    const int64_t start = index * kSpan;
    const int64_t count = std::min<int64_t>(kSpan, length(a, task.slot) - start);
    int64_t seen = count;
    for (int64_t r = 0; r < task.rows; ++r) {
      const int64_t pos = position(a, task.slot, (task.first + r) / group());
      low[r] = static_cast<int32_t>(std::clamp<int64_t>(low_seen(a, pos) - start, 0, count));
      high[r] = static_cast<int32_t>(std::clamp<int64_t>(high_seen(a, pos) - start, 0, count));
      seen = std::min<int64_t>(seen, low[r]);
    }
    // Blocks that no row sees may lie in pages given up: another's stand in, and are masked.
    const int64_t blocks = (count + kKeys - 1) / kKeys, first = std::min(seen, count - 1) / kKeys;
    const auto take = [&](auto& all, const auto& block) {
      for (int64_t b = first; b < blocks; ++b) all[b] = block(start + b * kKeys);
      std::fill(all, all + first, all[first]);
      std::fill(all + blocks, all + kBlocks, all[first]);
    };
    take(keys, [&](int64_t token) { return key_block(token); });
    take(values, [&](int64_t token) { return value_block(token); });
    if (codes) {
      take(k_scales, [&](int64_t token) { return scale_block(a.k_scales, token); });
      take(v_scales, [&](int64_t token) { return scale_block(a.v_scales, token); });
    }
    const auto kernel = rounds() ? k.attend_rounded : k.attend[static_cast<int>(a.type)];
    kernel(AttentionTile{q, task.heads, task.rows, a.H, keys, values, codes ? k_scales : nullptr,
                         codes ? v_scales : nullptr, a.Z, a.k_pages ? a.Z : 0, head_step(a), count,
                         next, next_keys, low, high, a.softcap, out, peak, total});
  }

  // Folds the sinks in, as a last span of one key whose value is zero, and divides.
  void finish(float* peak, float* total, float* sums) const {
    alignas(64) static constexpr float kNoValue[kMaxHead] = {}, kOne = 1.0f;
    for (int64_t r = 0; r < task.all_rows(); ++r) {
      if (a.sinks) {
        const float* sink = a.sinks + place(r) / a.H % a.N;
        k.merge(1, a.H, peak + r, total + r, sums + r * a.H, sink, &kOne, kNoValue);
      }
      if (a.lse) {
        const bool nothing = peak[r] == -std::numeric_limits<float>::infinity();
        a.lse[place(r) / a.H] = nothing ? kNothing : peak[r] + std::log(total[r]);
        if (nothing) continue;  // `out` is zeros there
      }
      k.scale(sums + r * a.H, 1.0f / total[r], a.H, a.out + place(r));
    }
  }
};

void whole_task(const Kernels& k, const Attention& a, const Task& task, const Task* next) {
  Worker worker(k, a, task);
  const Worker then(k, a, next ? *next : task);
  const auto span = [&](int64_t index, float* peak, float* total, float* out) {
    const bool more = index + 1 < task.span1;
    worker.span(index, peak, total, out, more ? &worker : next ? &then : nullptr,
                more ? index + 1 : then.task.span0);
  };
  float peak[kMaxQueries], total[kMaxQueries], next_peak[kMaxQueries], next_total[kMaxQueries];
  alignas(64) float out[kQueryFloats];
  alignas(64) float next_out[kQueryFloats];
  worker.load_queries();
  span(task.span0, peak, total, out);
  for (int64_t index = task.span0 + 1; index < task.span1; ++index) {
    span(index, next_peak, next_total, next_out);
    k.merge(task.all_rows(), a.H, peak, total, out, next_peak, next_total, next_out);
  }
  worker.finish(peak, total, out);
}

// Spans apart, then folded in order: the same operations as whole_task, on more threads.
void split_tasks(Pool& pool, const Kernels& k, const Attention& a, const std::vector<Task>& tasks,
                 size_t partial_rows) {
  std::vector<float> peak(partial_rows), total(partial_rows);
  std::vector<float> out(partial_rows * static_cast<size_t>(a.H));
  std::vector<std::pair<const Task*, int64_t>> units;
  for (const Task& task : tasks) {
    for (int64_t index = task.span0; index < task.span1; ++index) units.emplace_back(&task, index);
  }
  const auto row_of = [](const Task& task, int64_t index) {
    return task.partial + static_cast<size_t>((index - task.span0) * task.all_rows());
  };
  parallel_for(pool, static_cast<int64_t>(units.size()), [&](int64_t unit) {
    const auto [task, index] = units[static_cast<size_t>(unit)];
    const size_t row = row_of(*task, index);
    Worker worker(k, a, *task);
    worker.load_queries();
    const bool more = static_cast<size_t>(unit) + 1 < units.size();
    const auto [later, later_index] = units[static_cast<size_t>(unit) + more];
    const Worker then(k, a, *later);
    worker.span(index, &peak[row], &total[row], &out[row * static_cast<size_t>(a.H)],
                more ? &then : nullptr, later_index);
  });
  for (const Task& task : tasks) {
    const size_t first = task.partial;
    float* sums = &out[first * static_cast<size_t>(a.H)];
    for (int64_t index = task.span0 + 1; index < task.span1; ++index) {
      const size_t row = row_of(task, index);
      k.merge(task.all_rows(), a.H, &peak[first], &total[first], sums, &peak[row], &total[row],
              &out[row * static_cast<size_t>(a.H)]);
    }
    Worker(k, a, task).finish(&peak[first], &total[first], sums);
  }
}

// The tasks of one slot, those that see the most keys first so that threads finish together.
// Few rows of a slot take all heads in one task, which reads the pages in order of address.
void add_tasks(const Attention& a, int64_t slot, bool whole_rows, std::vector<Task>* tasks,
               size_t* partial_rows) {
  const int64_t group = a.N / a.K, rows = queries(a, slot) * group;
  const int64_t most = std::clamp<int64_t>(kQueryFloats / a.H, 1, kMaxQueries);
  const int64_t heads = whole_rows && rows * a.K <= most ? a.K : 1;
  for (int64_t tile = (rows - 1) / most; tile >= 0; --tile) {
    const int64_t first = tile * most, n = std::min(most, rows - first);
    const int64_t low = low_seen(a, position(a, slot, first / group));
    const int64_t high = high_seen(a, position(a, slot, (first + n - 1) / group));
    if (low >= high) continue;  // other shares have all that these rows see
    for (int64_t head = 0; head < a.K; head += heads) {
      Task task{slot, head, heads, first, n, low / kSpan, (high - 1) / kSpan + 1, *partial_rows};
      *partial_rows += static_cast<size_t>((task.span1 - task.span0) * task.all_rows());
      tasks->push_back(task);
    }
  }
}

}  // namespace

std::string attend(Pool& pool, const Kernels& kernels, const Attention& a) {
  std::string problem = check(a);
  if (!problem.empty()) return problem;

  if (a.lse) {
    std::fill(a.out, a.out + a.T * a.N * a.H, 0.0f);
    std::fill(a.lse, a.lse + a.T * a.N, kNothing);
  }
  std::vector<std::pair<int64_t, int64_t>> rows;  // slot and query of each live row
  int64_t covered = 0, spans = 0;
  for (int64_t s = 0; s < a.S; ++s) {
    const int64_t count = queries(a, s);
    if (count == 0) continue;
    std::fill(a.out + covered * a.N * a.H, a.out + a.query_start[s] * a.N * a.H, 0.0f);
    covered = a.query_start[s + 1];
    for (int64_t i = 0; i < count; ++i) rows.emplace_back(s, i);
    spans += (length(a, s) - 1) / kSpan - low_seen(a, a.kv_lens[s] - count) / kSpan + 1;
  }
  std::fill(a.out + covered * a.N * a.H, a.out + a.T * a.N * a.H, 0.0f);

  const int64_t live = static_cast<int64_t>(rows.size());
  const auto append_row = [&](int64_t i) {
    append(kernels, a, rows[static_cast<size_t>(i)].first, rows[static_cast<size_t>(i)].second);
  };
  if (live * a.K * a.H < kSerialFloats) {
    for (int64_t i = 0; i < live; ++i) append_row(i);
  } else {
    parallel_for(pool, (live + 7) / 8, [&](int64_t unit) {
      for (int64_t i = unit * 8; i < std::min(live, unit * 8 + 8); ++i) append_row(i);
    });
  }

  std::vector<Task> tasks;
  size_t partial_rows = 0;
  int64_t longest = 0;
  const bool whole_rows = pool.threads() == 1 || spans >= 2 * pool.threads();
  for (int64_t s = 0; s < a.S; ++s) {
    if (queries(a, s) > 0) add_tasks(a, s, whole_rows, &tasks, &partial_rows);
  }
  for (const Task& task : tasks) longest = std::max(longest, task.span1 - task.span0);
  const int64_t count = static_cast<int64_t>(tasks.size());
  if (longest > 1 && count < 4 * pool.threads()) {
    split_tasks(pool, kernels, a, tasks, partial_rows);
  } else {
    parallel_for(pool, count, [&](int64_t i) {
      const Task* task = &tasks[static_cast<size_t>(i)];
      whole_task(kernels, a, *task, i + 1 < count ? task + 1 : nullptr);
    });
  }
  return "";
}

}  // namespace stoker
