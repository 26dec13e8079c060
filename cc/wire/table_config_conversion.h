// TableConfig to its protobuf message, to JSON, and back.

#ifndef TFSWITCH_CC_WIRE_TABLE_CONFIG_CONVERSION_H_
#define TFSWITCH_CC_WIRE_TABLE_CONFIG_CONVERSION_H_

#include <string>

#include "absl/status/status.h"
#include "cc/table/table_config.h"
#include "google/protobuf/message.h"
#include "tfswitch/v1/table_config.pb.h"

namespace tfswitch {

// Every field is written, defaults too, so that the message does not depend on
// the defaults of the other side.
v1::TableConfig ToProto(const TableConfig& config);

// An unset field gets the default written in the proto. Nothing is validated
// here: TableConfig::Validate reports errors. A dim beyond int is clamped to
// the largest int, which Validate refuses.
TableConfig FromProto(const v1::TableConfig& proto);

// InvalidArgument naming the first field or value of the config that a later
// version has and this one does not know: it would be taken for a default.
absl::Status CheckKnown(const google::protobuf::Message& config);

v1::EvictionConfig ToProto(const EvictionConfig& config);
EvictionConfig FromProto(const v1::EvictionConfig& proto);
ConsistencyConfig FromProto(const v1::ConsistencyConfig& proto);

// The JSON of the message; the C API and checkpoint manifests have it.
std::string TableConfigToJson(const TableConfig& config);
absl::Status TableConfigFromJson(const std::string& json, TableConfig* config);

// The fields in which two configs differ, for error messages:
// "dim (8 here, 16 asked)". Empty if equal.
std::string DescribeDifference(const TableConfig& existing,
                               const TableConfig& asked);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_WIRE_TABLE_CONFIG_CONVERSION_H_
