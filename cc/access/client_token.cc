#include "cc/access/client_token.h"

#include <cstdlib>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "cc/access/tokens.h"
#include "cc/base/files.h"
#include "cc/base/log_writer.h"
#include "cc/base/status_macros.h"

namespace tfswitch {
namespace {

// The file may also contain the whole output of `tfswitch token create`.
constexpr size_t kMaxFileBytes = 64 << 10;

absl::string_view LastLine(absl::string_view text) {
  text = absl::StripAsciiWhitespace(text);
  const size_t end = text.find_last_of("\r\n");
  return end == text.npos ? text : text.substr(end + 1);
}

}  // namespace

TokenSource WithTokenEnvironment(TokenSource source) {
  if (source == TokenSource()) {
    if (const char* text = std::getenv("TFSWITCH_TOKEN")) source.text = text;
    if (const char* file = std::getenv("TFSWITCH_TOKEN_FILE")) {
      source.file = file;
    }
  }
  if (!source.file.empty()) source.file = AbsolutePath(source.file);
  return source;
}

absl::StatusOr<std::shared_ptr<ClientToken>> ClientToken::Open(
    const TokenSource& source) {
  if (source == TokenSource()) return nullptr;
  TFSWITCH_RETURN_IF_ERROR(
      CheckIsNoToken("the file of a token (`token` as a pathlib.Path, or "
                     "TFSWITCH_TOKEN_FILE)",
                     source.file));
  if (!source.text.empty() && !source.file.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "there are a token and a file with one ('", source.file,
        "'); give one of them (`token`, TFSWITCH_TOKEN, TFSWITCH_TOKEN_FILE)"));
  }
  auto token = std::shared_ptr<ClientToken>(new ClientToken);
  MutexLock lock(&token->mutex_);
  if (!source.file.empty()) {
    token->file_.emplace(source.file, kMaxFileBytes);
    const absl::Status status = token->Read(/*now=*/true);
    if (!status.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("the token file '", source.file,
                       "' cannot be used: ", status.message()));
    }
    return token;
  }
  const absl::string_view text = absl::StripAsciiWhitespace(source.text);
  const absl::Status status = TokenId(text).status();
  if (!status.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the token (`token` or TFSWITCH_TOKEN): ", status.message()));
  }
  token->text_ = std::string(text);
  return token;
}

absl::Status ClientToken::Read(bool now) {
  TFSWITCH_ASSIGN_OR_RETURN(const std::optional<std::string> contents,
                            file_->ReadIfChanged(now));
  if (!contents.has_value()) return absl::OkStatus();
  const absl::string_view text = LastLine(*contents);
  TFSWITCH_RETURN_IF_ERROR(TokenId(text).status());
  text_ = std::string(text);
  has_warned_ = false;
  return absl::OkStatus();
}

std::string ClientToken::Get(bool now) {
  MutexLock lock(&mutex_);
  if (!file_.has_value()) return text_;
  const absl::Status status = Read(now);
  if (!status.ok() && !has_warned_) {
    has_warned_ = true;
    LogMessageInOrder(
        LogLevel::kWarning, {"tokens_unreadable"},
        absl::StrCat("the token file '", file_->path(), "': ", status.message(),
                     "; the token that it had before is shown"));
  }
  return text_;
}

}  // namespace tfswitch
