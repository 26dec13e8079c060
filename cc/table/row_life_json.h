// The JSON forms of table/row_life_config.h: those that protobuf's canonical
// mapping gives the messages of protos/tfswitch/v1/table_config.proto.

#ifndef TFSWITCH_CC_TABLE_ROW_LIFE_JSON_H_
#define TFSWITCH_CC_TABLE_ROW_LIFE_JSON_H_

#include "absl/status/status.h"
#include "cc/table/json_reader.h"
#include "cc/table/row_life_config.h"

namespace tfswitch {

OrderedJson ToJson(const StatisticsConfig& config);
OrderedJson ToJson(const AdmissionConfig& config);
OrderedJson ToJson(const EvictionConfig& config);

// InvalidArgument naming the field. What is absent has its default.
absl::Status FromJson(const Json& json, StatisticsConfig* config);
absl::Status FromJson(const Json& json, AdmissionConfig* config);
absl::Status FromJson(const Json& json, EvictionConfig* config);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_TABLE_ROW_LIFE_JSON_H_
