// The largest scores and where they are: a cut by their first bits, then a sort of what is above it.
#include <string.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <new>
#include <utility>
#include <vector>

#include "native.h"
#include "threads.h"

namespace {

constexpr int kBits = 11, kBuckets = 1 << kBits;

// Bits in the order of the numbers, as unsigned integers; both zeros are one.
inline uint32_t ordered(float x) {
  x += 0.0f;
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// What a thread works in.
struct Space {
  std::vector<float> pooled;
  std::vector<uint32_t> keys, some;
  std::vector<int64_t> places, spare;
  int64_t counts[kBuckets];
};

// Each score as the largest of `width` neighbours, of which those beyond the ends are 0.
const float* pool(const float* x, int64_t n, int64_t width, Space& space) {
  if (width == 1) return x;
  std::vector<float>& to = space.pooled;
  to.assign(n + width - 1, 0.0f);
  std::copy(x, x + n, to.begin() + (width - 1) / 2);
  for (int64_t done = 1; done < width;) {
    const int64_t step = std::min(done, width - done);
    for (int64_t i = 0; i + step < static_cast<int64_t>(to.size()); ++i) to[i] = to[i] > to[i + step] ? to[i] : to[i + step];
    done += step;
  }
  return to.data();
}

// The `count`-th largest key.
uint32_t cut(const std::vector<uint32_t>& keys, int64_t count, Space& space) {
  std::fill(space.counts, space.counts + kBuckets, 0);
  for (uint32_t key : keys) ++space.counts[key >> (32 - kBits)];
  int bucket = kBuckets - 1;
  for (; space.counts[bucket] < count; --bucket) count -= space.counts[bucket];
  // Written always, counted where it belongs: a branch would be guessed wrongly too often.
  space.some.resize(keys.size());
  uint32_t* end = space.some.data();
  for (uint32_t key : keys) {
    *end = key;
    end += static_cast<int>(key >> (32 - kBits)) == bucket;
  }
  std::nth_element(space.some.data(), space.some.data() + count - 1, end, std::greater<>());
  return space.some[count - 1];
}

// Sort places by their keys, the largest first, equal ones as they are.
void sort(const std::vector<uint32_t>& keys, Space& space) {
  space.spare.resize(space.places.size());
  for (int shift = 0; shift < 32; shift += kBits) {
    auto bucket = [&](int64_t place) { return (~keys[place] >> shift) & (kBuckets - 1); };
    std::fill(space.counts, space.counts + kBuckets, 0);
    for (int64_t place : space.places) ++space.counts[bucket(place)];
    int64_t before = 0;
    for (int64_t& at : space.counts) before += std::exchange(at, before);
    for (int64_t place : space.places) space.spare[space.counts[bucket(place)]++] = place;
    space.places.swap(space.spare);
  }
}

void rank(const float* scores, int64_t n, int64_t width, int64_t count, int64_t* to, Space& space) {
  const float* x = pool(scores, n, width, space);
  std::vector<uint32_t>& keys = space.keys;
  keys.resize(n);
  for (int64_t i = 0; i < n; ++i) keys[i] = ordered(x[i]);
  const uint32_t last = cut(keys, count, space);
  int64_t equal = count;  // keys as large as the last one that are taken, the first ones
  for (uint32_t key : keys) equal -= key > last;
  space.places.resize(n + 1);
  int64_t taken = 0;
  for (int64_t i = 0; i < n; ++i) {
    const bool same = keys[i] == last;
    space.places[taken] = i;
    taken += (keys[i] > last) | (same & (equal > 0));
    equal -= same;
  }
  space.places.resize(count);
  sort(keys, space);
  std::copy(space.places.begin(), space.places.end(), to);
}

}  // namespace

int longchat_rank(const float* scores, int heads, int64_t n, int64_t width, int64_t count, int64_t* index,
                  int threads) {
  std::atomic<bool> enough{true};
  longchat::parallel(threads, [&](longchat::Team& team, int) {
    int64_t begin, end;
    try {
      thread_local Space space;
      while (team.take(0, heads, 1, &begin, &end)) rank(scores + begin * n, n, width, count, index + begin * count, space);
    } catch (const std::bad_alloc&) {
      enough = false;
    }
  });
  return enough;
}
