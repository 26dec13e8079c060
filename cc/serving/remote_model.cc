// For each part, a lookup first reads the cache, and then finds the distinct
// keys among the missing ones. One call asks the servers for the missing keys
// of all parts. Then the rows are copied to their places and to the cache. If
// no row was cached and no key repeats, the client writes the rows directly to
// the caller's memory.
//
// The age of a cached row counts from the moment before the call to the
// servers, so that no row seems newer than it is. mutex_ is locked only when a
// lookup fails, or succeeds after a failed one.

#include "cc/serving/remote_model.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "cc/base/key_batch.h"
#include "cc/base/mutex.h"
#include "cc/base/status_macros.h"
#include "cc/serving/row_cache.h"

namespace tfswitch {
namespace {

constexpr size_t kMaxKeys = std::numeric_limits<int32_t>::max();

struct RemoteTable {
  int number = 0;  // Its number in the cache.
  int dim = 0;
};

// The request to the servers for one part of a lookup.
struct Request {
  const LookupPart* part = nullptr;
  int table = 0;
  // The indices in the part of the keys that are not cached; empty if no key of
  // the part is cached.
  std::vector<size_t> places;
  // The distinct keys.
  std::vector<Key> keys;
  // For each key that is not cached, its index in `keys`.
  std::vector<int32_t> inverse;
  // The received rows of `keys`. Empty if the client has written the rows
  // directly to the caller's memory.
  std::vector<float> rows;
};

// The state shared by a model and its pinned rows.
//
// Thread-safe.
class RemoteRows final : public PinnedRows {
 public:
  RemoteRows(RemoteRowsOptions options,
             const std::map<std::string, int>& tables,
             std::shared_ptr<ParameterClient> client)
      : options_(std::move(options)), client_(std::move(client)) {
    RowCacheOptions cache;
    cache.max_rows = options_.cache_rows;
    cache.lifetime = options_.cache_lifetime;
    for (const auto& [table, dim] : tables) {
      tables_[table] = {static_cast<int>(cache.dims.size()), dim};
      cache.dims.push_back(dim);
    }
    if (cache.max_rows > 0) cache_ = std::make_unique<RowCache>(cache);
  }

  // Asks the servers for the tables.
  absl::Status Check() const;

  absl::Status Lookup(absl::Span<const LookupPart> parts,
                      const LentThreads* threads) const override {
    absl::Status status = TryLookup(parts, threads);
    // Locks the mutex only after a failure, and at the first success after it.
    if (!status.ok() || last_failed_.load(std::memory_order_relaxed)) {
      MutexLock lock(&mutex_);
      last_failed_ = !status.ok();
      error_ = status;
      if (!status.ok()) ++num_failed_;
    }
    return status;
  }

  ServedState state() const {
    ServedState state;
    state.is_remote = true;
    state.addresses = options_.addresses;
    state.rows.served_since_ms = served_since_ms_;
    if (cache_ != nullptr) {
      state.cached_rows = static_cast<int64_t>(cache_->size());
      state.num_cache_hits = cache_->num_hits();
      state.num_cache_misses = cache_->num_misses();
    }
    MutexLock lock(&mutex_);
    state.rows.num_refused = num_failed_;
    state.rows.error = error_;
    return state;
  }

  const std::string& addresses() const { return options_.addresses; }

 private:
  absl::Status TryLookup(absl::Span<const LookupPart> parts,
                         const LentThreads* threads) const;
  absl::StatusOr<RemoteTable> TableOf(const LookupPart& part) const;
  // Adds a remedy to a server's error, for the person who serves the model.
  absl::Status Explain(const absl::Status& status) const;

  // Constant after construction; the client and the cache synchronise
  // themselves.
  const RemoteRowsOptions options_;
  const std::shared_ptr<ParameterClient> client_;
  const int64_t served_since_ms_ = absl::ToUnixMillis(absl::Now());
  std::map<std::string, RemoteTable, std::less<>> tables_;
  std::unique_ptr<RowCache> cache_;  // Null without a cache.

  mutable std::atomic<bool> last_failed_{false};
  mutable Mutex mutex_;
  mutable int64_t num_failed_ ABSL_GUARDED_BY(mutex_) = 0;
  mutable absl::Status error_ ABSL_GUARDED_BY(mutex_);  // Last lookup's.
};

absl::Status RemoteRows::Explain(const absl::Status& status) const {
  const auto with = [&](absl::string_view remedy) {
    return absl::Status(status.code(), absl::StrCat(status.message(), remedy));
  };
  switch (status.code()) {
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDeadlineExceeded:
      return with(
          absl::StrCat(" The model looks up at ", options_.addresses,
                       "; TFSWITCH_SERVING_ADDRESSES can name other servers, "
                       "and TFSWITCH_SERVING_DEADLINE_SECS another time "
                       "than ",
                       absl::FormatDuration(options_.deadline), "."));
    case absl::StatusCode::kNotFound:
      return with(absl::StrCat(". The model looks up at ", options_.addresses,
                               "; train or restore the table there, or name "
                               "other servers in TFSWITCH_SERVING_ADDRESSES."));
    case absl::StatusCode::kUnauthenticated:
    case absl::StatusCode::kPermissionDenied:
      return with(absl::StrCat(
          ". The token is that of the process that serves the model, "
          "towards ",
          options_.addresses,
          " (TFSWITCH_TOKEN_FILE or TFSWITCH_TOKEN; or `token` of an earlier "
          "tfswitch.connect)."));
    default:
      return status;
  }
}

absl::Status RemoteRows::Check() const {
  // Lists all tables, because that takes only one call for each server.
  const auto infos = client_->ListTables("");
  if (!infos.ok()) return Explain(infos.status());
  std::map<std::string, const TableInfo*> tables;
  std::vector<std::string> names;
  for (const TableInfo& info : *infos) {
    tables[info.config.name] = &info;
    names.push_back(info.config.name);
  }
  for (const auto& [name, table] : tables_) {
    const auto found = tables.find(name);
    if (found == tables.end()) {
      // Does not return NotFound: TensorFlow would take it to mean that a file
      // of the model is missing.
      return absl::FailedPreconditionError(
          absl::StrCat("there is no table '", name, "' at ", options_.addresses,
                       ", where the model looks it up; there are: ",
                       names.empty() ? "none" : absl::StrJoin(names, ", "),
                       ". Train or restore it there, or name other servers in "
                       "TFSWITCH_SERVING_ADDRESSES."));
    }
    const TableInfo& info = *found->second;
    if (info.num_shards != client_->num_shards()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "table '", name, "' is on ", info.num_shards, " of the ",
          client_->num_shards(), " servers at ", options_.addresses,
          ": the others have lost it. Restore it there."));
    }
    if (info.config.dim != table.dim) {
      return absl::FailedPreconditionError(absl::StrCat(
          "table '", name, "' has dim ", info.config.dim, " at ",
          options_.addresses, ", the model has dim ", table.dim,
          " for it. Save the model again, or name the servers it was trained "
          "on in TFSWITCH_SERVING_ADDRESSES."));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<RemoteTable> RemoteRows::TableOf(const LookupPart& part) const {
  const auto found = tables_.find(part.table);
  if (found == tables_.end()) {
    return absl::NotFoundError(absl::StrCat(
        "table '", part.table, "' is not among those that the model serves"));
  }
  if (found->second.dim != part.dim) {
    return absl::InvalidArgumentError(
        absl::StrCat("table '", part.table, "' has dim ", found->second.dim,
                     " in the model file, the lookup has dim ", part.dim));
  }
  if (part.keys.size() > kMaxKeys) {
    return absl::InvalidArgumentError(absl::StrCat(
        "table '", part.table, "': at most ", kMaxKeys, " ids per lookup, got ",
        part.keys.size(), ". Split the batch."));
  }
  return found->second;
}

absl::Status RemoteRows::TryLookup(absl::Span<const LookupPart> parts,
                                   const LentThreads* threads) const {
  const RowCache::Time now = std::chrono::steady_clock::now();
  std::vector<Request> requests;
  requests.reserve(parts.size());
  std::vector<PullPart> pulls;
  for (const LookupPart& part : parts) {
    TFSWITCH_ASSIGN_OR_RETURN(const RemoteTable table, TableOf(part));
    if (part.keys.empty()) continue;
    Request request;
    request.part = &part;
    request.table = table.number;
    std::vector<Key> missing;
    absl::Span<const Key> keys = part.keys;
    if (cache_ != nullptr) {
      cache_->Read(table.number, part.keys, now, part.embeddings,
                   &request.places);
      if (request.places.empty()) continue;
      missing.reserve(request.places.size());
      for (const size_t place : request.places) {
        missing.push_back(part.keys[place]);
      }
      keys = missing;
    }
    request.keys.resize(keys.size());
    request.inverse.resize(keys.size());
    request.keys.resize(ThreadUniqueKeys().Run(
        keys, absl::MakeSpan(request.keys), absl::MakeSpan(request.inverse)));
    const size_t dim = static_cast<size_t>(part.dim);
    float* rows = part.embeddings;
    if (request.keys.size() != part.keys.size()) {
      request.rows.resize(request.keys.size() * dim);
      rows = request.rows.data();
    }
    PullPart pull;
    pull.args.table = std::string(part.table);
    pull.args.dim = part.dim;
    pull.args.threads = threads;
    pull.embeddings = absl::MakeSpan(rows, request.keys.size() * dim);
    requests.push_back(std::move(request));
    // The span points into the request, so it is set after the request was
    // moved into the vector.
    pull.args.keys = requests.back().keys;
    pulls.push_back(std::move(pull));
  }
  if (pulls.empty()) return absl::OkStatus();
  absl::Status status = client_->StartPull(pulls)->Wait();
  if (!status.ok()) return Explain(status);
  for (const Request& request : requests) {
    const LookupPart& part = *request.part;
    const size_t dim = static_cast<size_t>(part.dim);
    const float* rows = part.embeddings;
    if (!request.rows.empty()) {
      rows = request.rows.data();
      if (cache_ == nullptr) {
        ScatterRows(request.inverse, part.dim, rows, part.embeddings);
      }
      for (size_t i = 0; i < request.places.size(); ++i) {
        std::copy_n(rows + request.inverse[i] * dim, dim,
                    part.embeddings + request.places[i] * dim);
      }
    }
    if (cache_ != nullptr) {
      cache_->Write(request.table, request.keys, rows, now);
    }
  }
  return absl::OkStatus();
}

class RemoteModel final : public ServedModel {
 public:
  explicit RemoteModel(std::shared_ptr<const RemoteRows> rows)
      : rows_(std::move(rows)) {}

  bool is_remote() const override { return true; }
  std::shared_ptr<const PinnedRows> Pin() const override { return rows_; }
  ServedState state() const override { return rows_->state(); }
  absl::Status Refresh() override { return NoExports(); }
  absl::Status Watch(absl::Duration) override { return NoExports(); }
  absl::Status RollBack(int64_t) override { return NoExports(); }
  absl::Status Resume() override { return NoExports(); }

 private:
  absl::Status NoExports() const {
    return absl::FailedPreconditionError(absl::StrCat(
        "the model looks up on servers, at ", rows_->addresses(),
        ": it has no exports, and serves what is trained as it is read. Save "
        "it with mode=\"embedded\" to serve exports."));
  }

  const std::shared_ptr<const RemoteRows> rows_;  // Has its own locks.
};

}  // namespace

absl::StatusOr<std::shared_ptr<ServedModel>> OpenRemoteModel(
    const RemoteRowsOptions& options, const std::map<std::string, int>& tables,
    std::shared_ptr<ParameterClient> client) {
  const auto rows =
      std::make_shared<RemoteRows>(options, tables, std::move(client));
  TFSWITCH_RETURN_IF_ERROR(rows->Check());
  return std::make_shared<RemoteModel>(rows);
}

}  // namespace tfswitch
