// Converts TableConfig to its protobuf message, to JSON, and back.

#ifndef TFSWITCH_CC_WIRE_TABLE_CONFIG_CONVERSION_H_
#define TFSWITCH_CC_WIRE_TABLE_CONFIG_CONVERSION_H_

#include <string>

#include "absl/status/status.h"
#include "cc/table/table_config.h"
#include "google/protobuf/message.h"
#include "tfswitch/v1/table_config.pb.h"

namespace tfswitch {

// Writes every field, even if it has its default, so that the message does not
// depend on the defaults of its reader.
v1::TableConfig ToProto(const TableConfig& config);

// Reads a message; an unset field gets its default. Reports no errors, because
// TableConfig::Validate does. A dim that an int cannot hold becomes the largest
// int, which Validate refuses.
TableConfig FromProto(const v1::TableConfig& proto);

// InvalidArgument if the config has a field or value that this version does not
// know. The error names the first one. FromProto() would take it for a default.
absl::Status CheckKnown(const google::protobuf::Message& config);

v1::EvictionConfig ToProto(const EvictionConfig& config);
EvictionConfig FromProto(const v1::EvictionConfig& proto);
ConsistencyConfig FromProto(const v1::ConsistencyConfig& proto);

// These functions write and read the message as JSON, for the C API.
std::string TableConfigToJson(const TableConfig& config);
absl::Status TableConfigFromJson(const std::string& json, TableConfig* config);

// Describes the fields in which two configs differ, for error messages, for
// example "dim (8 here, 16 asked)"; empty if they are equal.
std::string DescribeDifference(const TableConfig& existing,
                               const TableConfig& asked);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_WIRE_TABLE_CONFIG_CONVERSION_H_
