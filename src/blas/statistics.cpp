#include "blas/statistics.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <tuple>
#include <vector>

namespace ingot::blas {
namespace {

constexpr size_t kMostKinds = 4096;
constexpr size_t kLinesOfText = 40;

struct Kind {
  const char* function;
  bool transpose_a, transpose_b;
  int64_t m, n, k, batches;
  Outcome outcome;

  auto order() const {
    return std::tie(function, transpose_a, transpose_b, m, n, k, batches, outcome);
  }
  friend bool operator<(const Kind& a, const Kind& b) { return a.order() < b.order(); }
};

struct Table {
  std::mutex mutex;
  std::map<Kind, uint64_t> counts;
  uint64_t dropped = 0;
  std::atomic<uint64_t> other{0};
  std::atomic<bool> registered{false};
  pid_t process = 0;
};

// Never destroyed: products may come as late as in other libraries' destructors.
Table& table() {
  static Table* made = new Table;
  return *made;
}

using Row = std::pair<Kind, uint64_t>;

// What counts most, first: by work.
std::vector<Row> rows_of(Table& t) {
  const std::lock_guard lock(t.mutex);
  std::vector<Row> rows(t.counts.begin(), t.counts.end());
  const auto work = [](const Row& row) {
    const Kind& kind = row.first;
    return static_cast<double>(kind.m) * static_cast<double>(kind.n) * static_cast<double>(kind.k) *
           static_cast<double>(kind.batches) * static_cast<double>(row.second);
  };
  std::stable_sort(rows.begin(), rows.end(),
                   [&](const Row& a, const Row& b) { return work(a) > work(b); });
  return rows;
}

template <class... Arguments>
void append(std::string& text, const char* format, Arguments... arguments) {
  char line[512];
  std::snprintf(line, sizeof(line), format, arguments...);
  text += line;
}

// The program's name, of which JSON can hold every byte that is left.
std::string command() {
  std::string name;
  char buffer[256];
  const int file = open("/proc/self/comm", O_RDONLY | O_CLOEXEC);
  if (file < 0) return name;
  const ssize_t bytes = read(file, buffer, sizeof(buffer));
  close(file);
  for (ssize_t i = 0; i < bytes; ++i) {
    const char c = buffer[i];
    if (c >= ' ' && c < 127 && c != '"' && c != '\\') name += c;
  }
  return name;
}

void write_all(int file, const std::string& text) {
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t bytes = write(file, text.data() + done, text.size() - done);
    if (bytes <= 0) return;
    done += static_cast<size_t>(bytes);
  }
}

void write_report() {
  Table& t = table();
  // A forked child has its parent's table, whose report is the parent's.
  if (t.process != getpid()) return;
  const char* where = std::getenv("INGOT_BLAS_REPORT");
  if (where == nullptr || *where == '\0') return;
  if (std::strcmp(where, "stderr") == 0) {
    write_all(STDERR_FILENO, report_as_text());
    return;
  }
  const int file = open(where, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0) return;
  write_all(file, report_as_json());  // in one write: processes share the file
  close(file);
}

}  // namespace

void report_at_exit() {
  Table& t = table();
  if (t.registered.load(std::memory_order_acquire) || t.registered.exchange(true)) return;
  t.process = getpid();
  std::atexit(write_report);
}

void count(const char* function, const Product& p, Outcome outcome) {
  report_at_exit();
  Table& t = table();
  const Kind kind = {
      function, p.operation_a != kNone, p.operation_b != kNone, p.m, p.n, p.k, p.batches, outcome};
  const std::lock_guard lock(t.mutex);
  if (const auto found = t.counts.find(kind); found != t.counts.end()) {
    ++found->second;
  } else if (t.counts.size() < kMostKinds) {
    t.counts.emplace(kind, 1);
  } else {
    ++t.dropped;
  }
}

void count_other() {
  report_at_exit();
  table().other.fetch_add(1, std::memory_order_relaxed);
}

std::string report_as_json() {
  Table& t = table();
  std::string text;
  append(text, R"({"process": %d, "command": "%s", "products": [)", static_cast<int>(getpid()),
         command().c_str());
  const char* separator = "";
  for (const auto& [kind, count] : rows_of(t)) {
    append(text,
           R"(%s{"function": "%s", "transpose_a": %s, "transpose_b": %s, "m": %lld, "n": %lld, )"
           R"("k": %lld, "batches": %lld, "outcome": "%s", "taken": %s, "count": %llu})",
           separator, kind.function, kind.transpose_a ? "true" : "false",
           kind.transpose_b ? "true" : "false", static_cast<long long>(kind.m),
           static_cast<long long>(kind.n), static_cast<long long>(kind.k),
           static_cast<long long>(kind.batches), name_of(kind.outcome),
           is_taken(kind.outcome) ? "true" : "false", static_cast<unsigned long long>(count));
    separator = ", ";
  }
  append(text, R"(], "other": %llu, "dropped": %llu})",
         static_cast<unsigned long long>(t.other.load()),
         static_cast<unsigned long long>(t.dropped));
  return text + "\n";
}

std::string report_as_text() {
  Table& t = table();
  const std::vector<Row> rows = rows_of(t);
  uint64_t taken = 0, all = t.dropped;
  for (const auto& [kind, count] : rows) {
    all += count;
    if (is_taken(kind.outcome)) taken += count;
  }
  std::string text;
  append(text, "ingot: took %llu of %llu fp32 products; %llu products were not fp32\n",
         static_cast<unsigned long long>(taken), static_cast<unsigned long long>(all),
         static_cast<unsigned long long>(t.other.load()));
  for (size_t i = 0; i < std::min(rows.size(), kLinesOfText); ++i) {
    const Kind& kind = rows[i].first;
    append(text, "ingot: %10llu x  %s %c%c %lld x %lld x %lld",
           static_cast<unsigned long long>(rows[i].second), kind.function,
           kind.transpose_a ? 'T' : 'N', kind.transpose_b ? 'T' : 'N',
           static_cast<long long>(kind.m), static_cast<long long>(kind.n),
           static_cast<long long>(kind.k));
    if (kind.batches > 1) append(text, ", %lld times", static_cast<long long>(kind.batches));
    append(text, ": %s\n", name_of(kind.outcome));
  }
  if (rows.size() > kLinesOfText) {
    append(text, "ingot: and %zu other kinds of products\n", rows.size() - kLinesOfText);
  }
  return text;
}

}  // namespace ingot::blas
