// Validate() returns the first error. If two fields contradict each other, the
// error names the one to change and says why. A newer client may send a
// storage_dtype that this version does not know; Validate() refuses it.
//
// ValidateNew() also limits the length of file names. Validate() does not,
// because it also checks configs of existing checkpoints.

#include "cc/table/table_config.h"

#include <cmath>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "cc/base/files.h"
#include "cc/base/status_macros.h"
#include "cc/optimizer/optimizer.h"

namespace tfswitch {
namespace {

constexpr size_t kMaxNameSize = 256;
// The longest form of a table's name in file names. These have up to 33 more
// characters, and file systems allow 255.
constexpr size_t kMaxFileNameSize = 220;
constexpr uint32_t kMaxVirtualShards = 65536;
constexpr size_t kMaxLayoutSize = 65536;

absl::Status FieldError(const std::string& table, absl::string_view field,
                        absl::string_view expected, absl::string_view got) {
  return absl::InvalidArgumentError(
      absl::StrCat("table '", absl::Utf8SafeCHexEscape(table), "': ", field,
                   ": expected ", expected, ", got ", got));
}

// Returns the value's name in the proto's enum.
const char* NameOf(FloatType type) {
  switch (type) {
    case FloatType::kFloat32:
      return "FLOAT32";
    case FloatType::kFloat16:
      return "FLOAT16";
    case FloatType::kBfloat16:
      return "BFLOAT16";
  }
  return "";
}
const char* NameOf(Rounding rounding) {
  switch (rounding) {
    case Rounding::kStochastic:
      return "STOCHASTIC";
    case Rounding::kNearest:
      return "NEAREST";
  }
  return "";
}

absl::Status ValidateInitializer(const std::string& table,
                                 const InitializerConfig& config) {
  if (const auto fault = FindFault(config)) {
    return FieldError(table, absl::StrCat("initializer.", fault->name),
                      fault->expected, fault->got);
  }
  const auto* uniform = std::get_if<UniformInitializer>(&config);
  if (uniform != nullptr &&
      (uniform->minval > uniform->maxval ||
       !std::isfinite(uniform->maxval - uniform->minval))) {
    return FieldError(table, "initializer.uniform",
                      "minval <= maxval, a finite range apart",
                      absl::StrCat("minval ", uniform->minval.value,
                                   ", maxval ", uniform->maxval.value));
  }
  return absl::OkStatus();
}

// Checks a table whose rows are blocks of the variables of a model.
absl::Status CheckDenseTable(const TableConfig& config) {
  if (!(config.admission == AdmissionConfig() &&
        config.eviction == EvictionConfig() && !config.evicts_when_full() &&
        !config.demotes_when_full() &&
        config.statistics == StatisticsConfig())) {
    return FieldError(config.name, "admission, eviction and statistics", "none",
                      "some, for a dense table, whose rows all stay");
  }
  if (config.storage_dtype == StorageDtypeConfig()) return absl::OkStatus();
  return FieldError(config.name, "storage_dtype", "float32, for a dense table",
                    config.storage_dtype.ToString());
}

// Checks a table in which each step moves all rows.
absl::Status CheckDenseUpdates(const TableConfig& config) {
  if (!config.layout.empty()) {
    return FieldError(config.name, "optimizer.is_dense",
                      "false for a dense table, whose rows are in each push",
                      "true");
  }
  if (config.admission.not_admitted.kind == NotAdmittedKind::kWeight) {
    return FieldError(config.name, "admission.not_admitted",
                      "no weight with dense updates, as ids that wait for "
                      "admission do not miss steps",
                      "a weight");
  }
  if (!config.storage_dtype.is_plain() &&
      Optimizer(config.optimizer, config.dim).takes_missed_steps()) {
    return FieldError(config.name, "storage_dtype",
                      "float32 with dense updates of a rule whose missed "
                      "steps have no sum, as many small steps would be lost "
                      "in 16 bits",
                      config.storage_dtype.ToString());
  }
  return absl::OkStatus();
}

}  // namespace

bool TableConfig::NeedsCounts() const {
  return statistics.kind != StatisticsKind::kNone || !admission.is_always() ||
         ReadsCounts(optimizer);
}

std::string ConsistencyConfig::ToString() const {
  switch (kind) {
    case ConsistencyKind::kAsp:
      return "asp";
    case ConsistencyKind::kSsp:
      return absl::StrCat("ssp(", staleness, ")");
    case ConsistencyKind::kBsp:
      return reduction == Reduction::kMean ? "bsp(mean)" : "bsp(sum)";
  }
  return "";
}

std::string StorageDtypeConfig::ToString() const {
  if (is_plain()) return "float32";
  return absl::AsciiStrToLower(absl::StrCat(NameOf(embeddings), " embeddings, ",
                                            NameOf(slots), " slots, ",
                                            NameOf(rounding), " rounding"));
}

absl::Status TableConfig::ValidateNew() const {
  TFSWITCH_RETURN_IF_ERROR(Validate());
  const size_t size = FileNameOf(name).size();
  if (size <= kMaxFileNameSize) return absl::OkStatus();
  return FieldError(
      name, "name",
      absl::StrCat("1 to ", kMaxFileNameSize,
                   " bytes, where each but A-Z, a-z, 0-9, '-', '_' and '.' "
                   "counts as three"),
      absl::StrCat(size));
}

absl::Status TableConfig::Validate() const {
  if (name.empty() || name.size() > kMaxNameSize) {
    return FieldError(name, "name",
                      absl::StrCat("1 to ", kMaxNameSize, " characters"),
                      absl::StrCat(name.size()));
  }
  for (const char c : name) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      return FieldError(name, "name", "no control characters",
                        absl::CHexEscape(std::string(1, c)));
    }
  }
  if (dim < kMinDim || dim > kMaxDim) {
    return FieldError(
        name, "dim", absl::StrCat("an integer from ", kMinDim, " to ", kMaxDim),
        absl::StrCat(dim));
  }
  const absl::Status optimizer_status = ValidateOptimizerConfig(optimizer, dim);
  if (!optimizer_status.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("table '", name, "': ", optimizer_status.message()));
  }
  TFSWITCH_RETURN_IF_ERROR(ValidateInitializer(name, initializer));
  if (num_virtual_shards == 0 || num_virtual_shards > kMaxVirtualShards ||
      (num_virtual_shards & (num_virtual_shards - 1)) != 0) {
    return FieldError(
        name, "num_virtual_shards",
        absl::StrCat("a power of two from 1 to ", kMaxVirtualShards),
        absl::StrCat(num_virtual_shards));
  }
  if (layout.size() > kMaxLayoutSize) {
    return FieldError(name, "layout",
                      absl::StrCat("at most ", kMaxLayoutSize, " characters"),
                      absl::StrCat(layout.size()));
  }
  if (consistency.kind > ConsistencyKind::kBsp ||
      consistency.reduction > Reduction::kSum) {
    return FieldError(name, "consistency", "values that this version has",
                      "another one");
  }
  // The value is unknown to this server; a newer client may have sent it.
  for (const char* known :
       {NameOf(storage_dtype.embeddings), NameOf(storage_dtype.slots),
        NameOf(storage_dtype.rounding)}) {
    if (*known == '\0') {
      return FieldError(name, "storage_dtype", "values that this version has",
                        storage_dtype.ToString());
    }
  }
  if (demotes_when_full() && eviction.max_rows.has_value()) {
    return FieldError(name, "when_full",
                      "refuse or evict, for a table with max_rows", "disk");
  }
  if (when_full > WhenFull::kDisk) {
    return FieldError(name, "when_full", "a value that this version has",
                      "another one");
  }
  if (*NameOf(wire_dtype.type) == '\0') {
    return FieldError(name, "wire_dtype", "a value that this version has",
                      "another one");
  }
  if (!layout.empty()) TFSWITCH_RETURN_IF_ERROR(CheckDenseTable(*this));
  if (optimizer.is_dense) TFSWITCH_RETURN_IF_ERROR(CheckDenseUpdates(*this));
  if (admission.not_admitted.kind == NotAdmittedKind::kWeight &&
      (optimizer.segments.size() < 2 || optimizer.segments[0].dim != 1)) {
    return FieldError(
        name, "admission.not_admitted.weight",
        "an optimizer with a first segment of dim 1, as "
        "tfswitch.optimizers.Segments([(1, a), (None, b)])",
        absl::StrCat(optimizer.segments.size(), " segments, the first of dim ",
                     optimizer.segments[0].dim));
  }
  const absl::Status life =
      ValidateRowLife(admission, eviction, statistics, dim, num_virtual_shards);
  if (life.ok()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("table '", name, "': ", life.message()));
}

}  // namespace tfswitch
