#include "cc/access/token_list.h"

#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cc/base/log_writer.h"
#include "cc/base/status_macros.h"
#include "cc/base/steady_clock.h"

namespace tfswitch {
namespace {

absl::Status OverQuota(const TokenRecord& record, absl::string_view what,
                       uint64_t limit) {
  return absl::ResourceExhaustedError(
      absl::StrCat("token ", record.id, ": ", what, ", over its limit of ",
                   limit, "; send less at a time"));
}

}  // namespace

absl::Status TokenUse::Enter(const TokenRecord& record) {
  const uint64_t calls = ++calls_;
  const uint64_t limit = record.quota.max_calls_in_flight;
  if (calls <= limit) return absl::OkStatus();
  --calls_;
  return OverQuota(record, absl::StrCat(calls, " calls at a time"), limit);
}

absl::Status TokenUse::Add(const TokenRecord& record, uint64_t bytes) {
  const uint64_t all = bytes_ += bytes;
  const uint64_t limit = record.quota.max_bytes_in_flight;
  if (all <= limit) return absl::OkStatus();
  return OverQuota(record, absl::StrCat(all, " bytes at a time"), limit);
}

void TokenUse::Leave(uint64_t bytes) {
  bytes_ -= bytes;
  --calls_;
}

bool TokenUse::ReserveRows(const TokenRecord& record, size_t num_new, bool now,
                           const std::function<int64_t()>& count) {
  MutexLock lock(&mutex_);
  const absl::Time time = SteadyNow();
  if (now || time >= next_count_) {
    next_count_ = time + absl::Milliseconds(100);
    num_rows_ = static_cast<uint64_t>(count());
  }
  if (num_rows_ + num_new > record.quota.max_rows) return false;
  num_rows_ += num_new;
  return true;
}

absl::StatusOr<std::unique_ptr<TokenList>> TokenList::Open(
    const std::string& path) {
  TFSWITCH_RETURN_IF_ERROR(CheckIsNoToken("--token_file", path));
  auto list = std::unique_ptr<TokenList>(new TokenList(path));
  MutexLock lock(&list->mutex_);
  const absl::Status status = list->Read(/*now=*/true);
  if (!status.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--token_file '", path, "' cannot be used: ", status.message(),
        "; `tfswitch token create` makes one"));
  }
  return list;
}

absl::Status TokenList::Read(bool now) {
  TFSWITCH_ASSIGN_OR_RETURN(const std::optional<std::string> text,
                            file_.ReadIfChanged(now));
  if (!text.has_value()) return absl::OkStatus();
  last_warning_.clear();
  TFSWITCH_ASSIGN_OR_RETURN(std::vector<TokenRecord> records,
                            ParseTokenFile(*text));
  auto tokens = std::make_shared<Tokens>();
  for (TokenRecord& record : records) {
    std::shared_ptr<TokenUse> use;
    if (tokens_ != nullptr) {
      const auto former = tokens_->find(record.id);
      if (former != tokens_->end()) use = former->second->use;
    }
    if (use == nullptr) use = std::make_shared<TokenUse>();
    std::string id = record.id;
    (*tokens)[std::move(id)] = std::make_shared<const KnownToken>(
        KnownToken{std::move(record), std::move(use)});
  }
  tokens_ = std::move(tokens);
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const KnownToken>> TokenList::Find(
    absl::string_view token) {
  // Reads the file again: the token may have been added since the last read.
  absl::StatusOr<std::shared_ptr<const KnownToken>> found =
      FindIn(*ReadTokens(/*now=*/false), token);
  return found.ok() ? found : FindIn(*ReadTokens(/*now=*/true), token);
}

std::shared_ptr<const TokenList::Tokens> TokenList::ReadTokens(bool now) {
  MutexLock lock(&mutex_);
  const absl::Status status = Read(now);
  const std::string warning = status.ok() ? "" : status.ToString();
  if (!status.ok() && warning != last_warning_) {
    LogMessage(LogLevel::kWarning, {"tokens_unreadable"},
               absl::StrCat("--token_file '", file_.path(), "': ", warning,
                            "; the tokens that it had before count"));
  }
  if (!status.ok()) last_warning_ = warning;
  return tokens_;
}

absl::StatusOr<std::shared_ptr<const KnownToken>> TokenList::FindIn(
    const Tokens& tokens, absl::string_view token) {
  // Returns the same error for all unknown tokens, so that callers cannot find
  // out which ids exist.
  const absl::Status unknown = absl::UnauthenticatedError(
      "the server does not know this token; it may have been revoked");
  const absl::StatusOr<absl::string_view> id = TokenId(token);
  if (!id.ok()) return unknown;
  const std::optional<TokenHash> hash = HashToken(token);
  if (!hash.has_value()) {
    return absl::ResourceExhaustedError("the server is out of memory");
  }
  const auto found = tokens.find(std::string(*id));
  if (found == tokens.end() || !AreEqual(found->second->record.hash, *hash)) {
    return unknown;
  }
  const absl::Time expires = found->second->record.expires;
  if (absl::Now() >= expires) {
    return absl::UnauthenticatedError(absl::StrCat(
        "token ", *id, " has expired at ",
        absl::FormatTime(absl::RFC3339_sec, expires, absl::UTCTimeZone()),
        "; ask for a new one"));
  }
  return found->second;
}

}  // namespace tfswitch
