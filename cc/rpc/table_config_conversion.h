// TableConfig and TableInfo to their protobuf messages and back.

#ifndef TFSWITCH_CC_RPC_TABLE_CONFIG_CONVERSION_H_
#define TFSWITCH_CC_RPC_TABLE_CONFIG_CONVERSION_H_

#include "cc/client/parameter_client.h"
#include "cc/table/table_config.h"
#include "tfswitch/v1/parameter_server.pb.h"
#include "tfswitch/v1/table_config.pb.h"

namespace tfswitch {

// Every field is written, defaults too, so that what travels does not depend on
// what the other side takes for a default.
v1::TableConfig ToProto(const TableConfig& config);

// An unset field gets the default written in the proto. Nothing is validated
// here: TableConfig::Validate says what is wrong. A dim beyond int is clamped
// to the largest int, which Validate refuses.
TableConfig FromProto(const v1::TableConfig& proto);

v1::EvictionConfig ToProto(const EvictionConfig& config);
EvictionConfig FromProto(const v1::EvictionConfig& proto);

v1::TableInfo ToProto(const TableInfo& info);
TableInfo FromProto(const v1::TableInfo& proto);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_TABLE_CONFIG_CONVERSION_H_
