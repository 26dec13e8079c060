#include "cc/client/prefetches.h"

#include <algorithm>
#include <exception>
#include <optional>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cc/base/half_floats.h"
#include "cc/base/key_batch.h"
#include "cc/base/status_macros.h"
#include "cc/client/aloud_wait.h"
#include "cc/table/embedding_table.h"
#include "cc/table/initializer.h"
#include "cc/table/row_codec.h"
#include "cc/wire/codec.h"

namespace tfswitch {
namespace {

bool AreAmong(absl::Span<const Key> some, absl::Span<const Key> keys) {
  std::unordered_set<Key> left(some.begin(), some.end());
  for (const Key key : keys) {
    if (left.empty()) break;
    left.erase(key);
  }
  return left.empty();
}

}  // namespace

KeyBits::KeyBits(absl::Span<const Key> keys) {
  uint64_t size = 64;
  while (size < 32 * keys.size()) size *= 2;
  mask_ = size - 1;
  bits_.resize(size / 64);
  for (const Key key : keys) {
    const uint64_t hash = HashKey(key) & mask_;
    bits_[hash / 64] |= uint64_t{1} << (hash % 64);
  }
}

struct Prefetches::Ticket {
  Ticket(const TableConfig& config, absl::Span<const Key> keys,
         const Options& options, std::vector<Key> unique_keys,
         bool changes_all_rows)
      : table(config.name),
        dim(static_cast<size_t>(config.dim)),
        wire_dtype(config.wire_dtype),
        options(options),
        keys(keys.begin(), keys.end()),
        unique(std::move(unique_keys)),
        filter(changes_all_rows ? KeyBits() : KeyBits(unique)),
        rows(new float[unique.size() * dim]),
        changes(unique.size()),
        open(unique.size()),
        has(unique.size()) {}

  // Constant after Begin().
  const std::string table;
  const size_t dim;
  const FloatType wire_dtype;
  const Options options;
  const std::vector<Key> keys;
  const std::vector<Key> unique;
  std::vector<int32_t> inverse;  // The index of each key in `unique`.
  const KeyBits filter;          // The rows that its push will change.
  uint64_t begun_after = 0;      // The number of the last push before Begin().

  // The members below are guarded by Prefetches::mutex_ until the ticket is
  // used and all its reads have ended.

  // For each of `unique` its row; the number of the last event since Begin()
  // that has changed the row, a begin or an end of a push (0: none); how many
  // pushes in flight change it; and whether it was read after that event.
  const std::unique_ptr<float[]> rows;
  std::vector<uint64_t> changes;
  std::vector<uint32_t> open;
  std::vector<bool> has;
  int num_reads = 1;  // Reads that have begun, or will begin by themselves.
  int num_open_pushes = 0;  // Pushes in flight that change its rows.
  bool is_lost = false;
  bool is_late = false;  // Whether its lookup had to wait.
  // ChangesOf() its table, and TableState::num_pushes, when its rows were read.
  RowChanges seen;
  int64_t num_pushes = 0;
};

struct Prefetches::OpenPush {
  std::unique_ptr<const KeyBits> keys;  // Null if no ticket is marked.
  std::vector<std::shared_ptr<Ticket>> marked;
  // Lists of TableState::used whose rows the push makes.
  std::vector<std::vector<Key>> used;
};

struct Prefetches::TableState {
  int dim = 0;  // 0: the table has had no tickets.
  // See ChangesAllRows(). Not set: not known yet.
  std::optional<bool> changes_all_rows;
  std::deque<std::shared_ptr<Ticket>> tickets;  // In the order of Begin().
  bool is_bsp = false;
  // The pushes in flight, by number.
  std::map<uint64_t, OpenPush> open_pushes;
  // The tickets that were used since the last push or, with bsp, round. A push
  // with their keys will probably come, unless this is no training.
  std::deque<std::shared_ptr<Ticket>> unpushed;
  bool expects_pushes = true;
  int64_t num_pushes = 0;  // That have begun.
  // Keys without a row that training has used.
  std::vector<std::vector<Key>> used;
  Stats stats;
};

Prefetches::Prefetches(ParameterClient* client)
    : client_(client),
      marks_missing_(client, &v1::HandshakeResponse::marks_missing,
                     "cannot read rows ahead; lookups read them when they need "
                     "them") {}
Prefetches::~Prefetches() = default;

Prefetches::TableState& Prefetches::StateOf(const std::string& table) {
  std::unique_ptr<TableState>& state = tables_[table];
  if (state == nullptr) state = std::make_unique<TableState>();
  return *state;
}

std::optional<bool> Prefetches::ChangesAllRows(const TableConfig& config) {
  if (!config.layout.empty()) return std::nullopt;
  {
    MutexLock lock(&mutex_);
    const std::optional<bool> known = StateOf(config.name).changes_all_rows;
    if (known.has_value()) return known;
  }
  // The optimizer may have been chosen, or the table made again, after this
  // handle was opened.
  const auto infos = client_->ListTables(config.name);
  if (!infos.ok() || infos->size() != 1) return std::nullopt;
  const TableConfig& present = (*infos)[0].config;
  if (present.optimizer.is_open) return std::nullopt;
  MutexLock lock(&mutex_);
  TableState& state = StateOf(config.name);
  state.is_bsp = present.consistency.kind == ConsistencyKind::kBsp;
  state.changes_all_rows = state.is_bsp || present.optimizer.is_dense;
  return state.changes_all_rows;
}

std::shared_ptr<Prefetches::Ticket> Prefetches::Begin(
    const TableConfig& config, absl::Span<const Key> keys,
    const Options& options) {
  if (keys.empty() || options.limit == 0) return nullptr;
  const std::optional<bool> changes_all_rows = ChangesAllRows(config);
  if (!changes_all_rows.has_value() ||
      !marks_missing_.IsKnown().value_or(false)) {
    return nullptr;
  }
  std::vector<Key> unique(keys.size());
  std::vector<int32_t> inverse(keys.size());
  unique.resize(ThreadUniqueKeys().Run(keys, absl::MakeSpan(unique),
                                       absl::MakeSpan(inverse)));
  auto ticket = std::make_shared<Ticket>(config, keys, options,
                                         std::move(unique), *changes_all_rows);
  ticket->inverse = std::move(inverse);
  MutexLock lock(&mutex_);
  has_tickets_ = true;
  TableState& state = StateOf(ticket->table);
  state.dim = config.dim;
  ticket->begun_after = last_change_;
  size_t num_own = 1;
  for (const auto& other : state.tickets) {
    num_own += other->options.source == options.source ? 1 : 0;
  }
  for (auto it = state.tickets.begin(); num_own > options.limit;) {
    if ((*it)->options.source != options.source) {
      ++it;
      continue;
    }
    (*it)->is_lost = true;
    it = state.tickets.erase(it);
    ++state.stats.num_unused;
    --num_own;
  }
  state.tickets.push_back(ticket);
  return ticket;
}

std::vector<size_t> Prefetches::PlacesToRead(const Ticket& ticket,
                                             uint64_t change) {
  const TableState& state = StateOf(ticket.table);
  // The keys of the tickets that will be used and pushed before this one. A
  // lookup may already wait for the ticket; then it waits for no other push.
  std::vector<const KeyBits*> earlier;
  const auto own =
      std::find_if(state.tickets.begin(), state.tickets.end(),
                   [&](const auto& other) { return other.get() == &ticket; });
  if (ticket.options.is_exact && state.expects_pushes &&
      own != state.tickets.end()) {
    for (const auto& used : state.unpushed) earlier.push_back(&used->filter);
    for (auto it = state.tickets.begin(); it != own; ++it) {
      earlier.push_back(&(*it)->filter);
    }
  }
  std::vector<size_t> places;
  for (size_t i = 0; i < ticket.unique.size(); ++i) {
    if (ticket.changes[i] != change || ticket.open[i] != 0) continue;
    const Key key = ticket.unique[i];
    const bool is_expected = std::any_of(
        earlier.begin(), earlier.end(),
        [&](const KeyBits* filter) { return filter->MayContain(key); });
    if (!is_expected) places.push_back(i);
  }
  return places;
}

absl::Status Prefetches::Read(std::vector<Fetch>* fetches) {
  // Without exceptions, because a lookup may wait for the end of the read.
  try {
    std::vector<PullPart> pulls;
    for (Fetch& fetch : *fetches) {
      const Ticket& ticket = *fetch.ticket;
      if (fetch.places.empty()) continue;
      fetch.keys.clear();
      for (const size_t i : fetch.places)
        fetch.keys.push_back(ticket.unique[i]);
      fetch.rows.resize(fetch.keys.size() * ticket.dim);
      PullArgs args;
      args.table = ticket.table;
      args.dim = static_cast<int>(ticket.dim);
      args.keys = fetch.keys;
      args.mark_missing = true;
      args.wire_dtype = ticket.wire_dtype;
      pulls.push_back({std::move(args), absl::MakeSpan(fetch.rows)});
    }
    return pulls.empty() ? absl::OkStatus() : client_->StartPull(pulls)->Wait();
  } catch (const std::exception& exception) {  // Out of memory, for example.
    return absl::ResourceExhaustedError(exception.what());
  }
}

void Prefetches::Run(const std::vector<std::shared_ptr<Ticket>>& tickets) {
  std::vector<Fetch> fetches;
  {
    MutexLock lock(&mutex_);
    for (const auto& ticket : tickets) {
      const TableState& state = StateOf(ticket->table);
      // Pushes that were in flight at Begin() have marked nothing.
      while (!ticket->is_lost && ticket->options.is_exact &&
             !state.open_pushes.empty() &&
             state.open_pushes.begin()->first <= ticket->begun_after) {
        changed_.Wait(&mutex_);
      }
      ticket->num_pushes = state.num_pushes;
      fetches.push_back({ticket, 0, {}, {}, {}});
      if (!ticket->is_lost) fetches.back().places = PlacesToRead(*ticket, 0);
    }
  }
  absl::Status status;
  std::vector<RowChanges> before(tickets.size());
  // The first read may tell of changes that came before it. Then all rows of
  // the second one are newer than these.
  for (bool is_first = true;; is_first = false) {
    for (size_t i = 0; i < tickets.size(); ++i) {
      before[i] = client_->ChangesOf(tickets[i]->table);
    }
    status = Read(&fetches);
    bool is_new = false;
    for (size_t i = 0; i < tickets.size(); ++i) {
      is_new |= client_->ChangesOf(tickets[i]->table).generations !=
                before[i].generations;
    }
    if (!is_first || !is_new || !status.ok()) break;
  }
  MutexLock lock(&mutex_);
  for (size_t i = 0; i < tickets.size(); ++i) {
    tickets[i]->seen = {before[i].generations,
                        client_->ChangesOf(tickets[i]->table).pushes_of_others};
  }
  Store(status, fetches);
}

void Prefetches::Store(const absl::Status& status,
                       const std::vector<Fetch>& fetches) {
  for (const Fetch& fetch : fetches) {
    Ticket& ticket = *fetch.ticket;
    --ticket.num_reads;
    if (!status.ok()) ticket.is_lost = true;
    if (ticket.is_lost) continue;
    for (size_t k = 0; k < fetch.places.size(); ++k) {
      const size_t i = fetch.places[k];
      if (ticket.changes[i] != fetch.change) continue;  // Changed again.
      std::copy_n(fetch.rows.begin() + k * ticket.dim, ticket.dim,
                  ticket.rows.get() + i * ticket.dim);
      ticket.has[i] = true;
    }
  }
  changed_.NotifyAll();
}

std::shared_ptr<Prefetches::Ticket> Prefetches::Take(
    const TableConfig& config, absl::Span<const Key> keys) {
  MutexLock lock(&mutex_);
  const auto found = tables_.find(config.name);
  if (found == tables_.end() || found->second->dim == 0) return nullptr;
  TableState& state = *found->second;
  for (auto it = state.tickets.begin(); it != state.tickets.end(); ++it) {
    if (absl::MakeConstSpan((*it)->keys) != keys ||
        (*it)->dim != static_cast<size_t>(config.dim) ||
        (*it)->wire_dtype != config.wire_dtype) {
      continue;
    }
    std::shared_ptr<Ticket> ticket = std::move(*it);
    state.tickets.erase(it);
    if (ticket->is_lost) break;
    ticket->is_late = ticket->num_reads > 0 || ticket->num_open_pushes > 0;
    // A few steps may come before their push, which has all their gradients.
    constexpr size_t kMostUnpushed = 8;
    state.unpushed.push_back(ticket);
    if (state.unpushed.size() > kMostUnpushed) {
      state.expects_pushes = false;
      state.unpushed.clear();
    }
    return ticket;
  }
  ++state.stats.num_misses;
  return nullptr;
}

absl::Status Prefetches::WaitFor(const Ticket& ticket) {
  MutexLock lock(&mutex_);
  return WaitAloud(
      &mutex_, &changed_,
      [&] {
        return ticket.is_lost ||
               (ticket.num_reads == 0 && ticket.num_open_pushes == 0);
      },
      [&] { return absl::StrCat("rows of table '", ticket.table, "'"); });
}

bool Prefetches::CountUse(const Ticket& ticket) {
  const RowChanges now = client_->ChangesOf(ticket.table);
  MutexLock lock(&mutex_);
  TableState& state = StateOf(ticket.table);
  Stats& stats = state.stats;
  if (ticket.is_lost || now.generations != ticket.seen.generations) {
    ++stats.num_misses;
    return false;
  }
  ++stats.num_hits;
  if (ticket.is_late) ++stats.num_late;
  if (!ticket.options.is_exact) {
    stats.own_pushes += state.num_pushes - ticket.num_pushes;
  }
  // An answer may count a push of this process before its own answer is here.
  stats.other_pushes +=
      std::max<int64_t>(0, now.pushes_of_others - ticket.seen.pushes_of_others);
  return true;
}

absl::Status Prefetches::Complete(const std::shared_ptr<Ticket>& ticket) {
  std::vector<Fetch> late = {{ticket, 0, {}, {}, {}}};
  {
    MutexLock lock(&mutex_);
    if (ticket->is_lost) return absl::OkStatus();
    for (size_t i = 0; i < ticket->unique.size(); ++i) {
      if (!ticket->has[i]) late[0].places.push_back(i);
    }
  }
  TFSWITCH_RETURN_IF_ERROR(Read(&late));
  for (size_t k = 0; k < late[0].places.size(); ++k) {
    std::copy_n(late[0].rows.begin() + k * ticket->dim, ticket->dim,
                ticket->rows.get() + late[0].places[k] * ticket->dim);
  }
  return absl::OkStatus();
}

absl::Status Prefetches::FillMissing(const TableConfig& config, bool inserts,
                                     float day, Ticket* ticket) {
  const size_t dim = ticket->dim;
  std::vector<size_t> places;
  std::vector<Key> keys;
  for (size_t i = 0; i < ticket->unique.size(); ++i) {
    if (BitsOfFloat(ticket->rows[i * dim]) != kMissingMark) continue;
    places.push_back(i);
    keys.push_back(ticket->unique[i]);
  }
  if (places.empty()) return absl::OkStatus();
  std::vector<float> values(places.size() * dim);
  const bool is_float32 =
      RowCodec(config).embedding_type() == FloatType::kFloat32;
  if (!inserts) {
    // Other lookups may have made some of these rows since they were read.
    TFSWITCH_RETURN_IF_ERROR(InsertUsed(day));
    PullArgs args;
    args.table = config.name;
    args.dim = config.dim;
    args.keys = keys;
    TFSWITCH_RETURN_IF_ERROR(client_->Pull(args, absl::MakeSpan(values)));
  } else if (is_float32) {
    Initializer(config.initializer, config.seed, config.dim)
        .Fill(keys.data(), keys.size(), values.data());
  } else {
    // The first value depends on how the server rounds it.
    TFSWITCH_RETURN_IF_ERROR(
        Insert(config.name, config.dim, keys, day, absl::MakeSpan(values)));
  }
  RoundRows(config.wire_dtype, absl::MakeSpan(values));
  for (size_t i = 0; i < places.size(); ++i) {
    std::copy_n(values.begin() + i * dim, dim,
                ticket->rows.get() + places[i] * dim);
  }
  if (!inserts || !is_float32) return absl::OkStatus();
  constexpr size_t kMostUsed = 16;
  std::vector<Key> oldest;
  {
    MutexLock lock(&mutex_);
    auto& used = StateOf(config.name).used;
    used.push_back(std::move(keys));
    has_used_ = true;
    if (used.size() > kMostUsed) {
      oldest = std::move(used.front());
      used.erase(used.begin());
    }
  }
  return oldest.empty() ? absl::OkStatus()
                        : Insert(config.name, config.dim, oldest, day);
}

absl::StatusOr<bool> Prefetches::Use(const TableConfig& config,
                                     absl::Span<const Key> keys, bool inserts,
                                     float day, float* embeddings,
                                     const LentThreads* threads) {
  if (!has_tickets_) return false;
  const std::shared_ptr<Ticket> ticket = Take(config, keys);
  if (ticket == nullptr) return false;
  TFSWITCH_RETURN_IF_ERROR(WaitFor(*ticket));
  TFSWITCH_RETURN_IF_ERROR(Complete(ticket));
  if (!CountUse(*ticket)) return false;
  TFSWITCH_RETURN_IF_ERROR(FillMissing(config, inserts, day, ticket.get()));
  ScatterRows(ticket->inverse, config.dim, ticket->rows.get(), embeddings,
              threads);
  return true;
}

absl::StatusOr<uint64_t> Prefetches::PushBegins(const PushArgs& push) {
  std::vector<std::vector<Key>> used;
  uint64_t number = 0;
  bool makes_rows = false;  // At once.
  {
    MutexLock lock(&mutex_);
    TableState& state = StateOf(push.table);
    number = ++last_change_;
    OpenPush& open = state.open_pushes[number];
    ++state.num_pushes;
    if (!state.is_bsp) state.unpushed.clear();
    state.expects_pushes = true;
    makes_rows = push.insert_missing && !state.is_bsp;
    used.swap(state.used);
    for (const auto& ticket : state.tickets) {
      if (!ticket->options.is_exact || state.is_bsp) continue;
      if (open.keys == nullptr) {
        open.keys = state.changes_all_rows.value_or(true)
                        ? std::make_unique<const KeyBits>()
                        : std::make_unique<const KeyBits>(push.keys);
      }
      bool is_marked = false;
      for (size_t i = 0; i < ticket->unique.size(); ++i) {
        if (!open.keys->MayContain(ticket->unique[i])) continue;
        ticket->changes[i] = number;
        ++ticket->open[i];
        ticket->has[i] = false;
        is_marked = true;
      }
      if (!is_marked) continue;
      ++ticket->num_open_pushes;
      open.marked.push_back(ticket);
    }
  }
  absl::Status status;
  for (std::vector<Key>& missing : used) {
    if (status.ok() && !(makes_rows && AreAmong(missing, push.keys))) {
      status = Insert(push.table, push.dim, missing, push.day);
      if (status.ok()) continue;
    }
    MutexLock lock(&mutex_);
    StateOf(push.table).open_pushes[number].used.push_back(std::move(missing));
  }
  if (status.ok()) return number;
  PushEnded(push.table, number, /*is_applied=*/false);
  return status;
}

bool Prefetches::PushEnded(const std::string& table, uint64_t push,
                           bool is_applied) {
  MutexLock lock(&mutex_);
  TableState& state = StateOf(table);
  const auto open = state.open_pushes.extract(push);
  const KeyBits* const keys = open.mapped().keys.get();
  const uint64_t number = ++last_change_;
  for (const auto& ticket : open.mapped().marked) {
    --ticket->num_open_pushes;
    if (!is_applied) ticket->is_lost = true;
    if (ticket->is_lost) continue;
    for (size_t i = 0; i < ticket->unique.size(); ++i) {
      if (!keys->MayContain(ticket->unique[i])) continue;
      ticket->changes[i] = number;
      --ticket->open[i];
    }
    ReadLater(ticket, number);
  }
  if (!is_applied) {
    for (std::vector<Key>& missing : open.mapped().used) {
      state.used.push_back(std::move(missing));
      has_used_ = true;
    }
  }
  changed_.NotifyAll();
  return !fetches_.empty();
}

void Prefetches::ReadLater(const std::shared_ptr<Ticket>& ticket,
                           uint64_t change) {
  std::vector<size_t> places = PlacesToRead(*ticket, change);
  if (places.empty()) return;
  ++ticket->num_reads;
  fetches_.push_back({ticket, change, std::move(places), {}, {}});
}

bool Prefetches::RoundEnded() {
  MutexLock lock(&mutex_);
  const uint64_t number = ++last_change_;
  for (const auto& [table, state] : tables_) {
    if (!state->is_bsp) continue;
    state->unpushed.clear();
    state->expects_pushes = true;
    for (const auto& ticket : state->tickets) {
      if (!ticket->options.is_exact || ticket->is_lost) continue;
      std::fill(ticket->changes.begin(), ticket->changes.end(), number);
      std::fill(ticket->has.begin(), ticket->has.end(), false);
      ReadLater(ticket, number);
    }
  }
  return !fetches_.empty();
}

void Prefetches::ReadAgain() {
  std::vector<Fetch> fetches;
  {
    MutexLock lock(&mutex_);
    fetches.swap(fetches_);
  }
  const absl::Status status = Read(&fetches);
  MutexLock lock(&mutex_);
  Store(status, fetches);
}

absl::Status Prefetches::Insert(const std::string& table, int dim,
                                absl::Span<const Key> keys, float day,
                                absl::Span<float> rows) {
  std::vector<float> unused;
  if (rows.empty()) {
    unused.resize(keys.size() * static_cast<size_t>(dim));
    rows = absl::MakeSpan(unused);
  }
  PullArgs args;
  args.table = table;
  args.dim = dim;
  args.keys = keys;
  args.insert_missing = true;
  args.day = day;
  return client_->Pull(args, rows);
}

absl::Status Prefetches::InsertUsed(float day) {
  if (!has_used_) return absl::OkStatus();
  // A second thread waits until the first has made the rows.
  MutexLock insert_lock(&insert_mutex_);
  struct Used {
    std::string table;
    int dim;
    std::vector<Key> keys;
  };
  std::vector<Used> all;
  {
    MutexLock lock(&mutex_);
    for (const auto& [table, state] : tables_) {
      for (std::vector<Key>& keys : state->used) {
        all.push_back({table, state->dim, std::move(keys)});
      }
      state->used.clear();
    }
  }
  absl::Status first;
  std::vector<Used> left;
  for (Used& each : all) {
    const absl::Status status = Insert(each.table, each.dim, each.keys, day);
    // A lost or dropped table loses these rows, too; its next use is an error.
    if (status.ok() || absl::IsDataLoss(status) || absl::IsNotFound(status)) {
      continue;
    }
    first.Update(status);
    // A later call tries again, unless this process may make no rows.
    if (!absl::IsPermissionDenied(status)) left.push_back(std::move(each));
  }
  MutexLock lock(&mutex_);
  for (Used& each : left) {
    StateOf(each.table).used.push_back(std::move(each.keys));
  }
  has_used_ = false;
  for (const auto& [table, state] : tables_) {
    if (!state->used.empty()) has_used_ = true;
  }
  return first;
}

void Prefetches::Abandon(const std::vector<std::shared_ptr<Ticket>>& tickets) {
  MutexLock lock(&mutex_);
  for (const auto& ticket : tickets) {
    --ticket->num_reads;
    ticket->is_lost = true;
  }
  changed_.NotifyAll();
}

void Prefetches::Drop(uint64_t source) {
  MutexLock lock(&mutex_);
  for (const auto& [table, state] : tables_) {
    if (source == 0) {
      state->changes_all_rows.reset();
      state->unpushed.clear();
    }
    auto& tickets = state->tickets;
    for (const auto& ticket : tickets) {
      if (source == 0 || ticket->options.source == source) {
        ticket->is_lost = true;
      }
    }
    tickets.erase(
        std::remove_if(tickets.begin(), tickets.end(),
                       [](const auto& ticket) { return ticket->is_lost; }),
        tickets.end());
  }
  changed_.NotifyAll();
}

std::map<std::string, Prefetches::Stats> Prefetches::stats() const {
  std::map<std::string, Stats> all;
  MutexLock lock(&mutex_);
  for (const auto& [table, state] : tables_) {
    if (state->dim == 0) continue;  // It has had no tickets.
    all[table] = state->stats;
    all[table].num_held = static_cast<int64_t>(state->tickets.size());
  }
  return all;
}

}  // namespace tfswitch
