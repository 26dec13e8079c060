// Converts the answers of ListTables, Shrink and ReadUsage to their protobuf
// messages and back, and sets the tables of requests.

#ifndef TFSWITCH_CC_WIRE_REPORT_CONVERSION_H_
#define TFSWITCH_CC_WIRE_REPORT_CONVERSION_H_

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "cc/table/embedding_table.h"
#include "cc/table/table_info.h"
#include "tfswitch/v1/parameter_server.pb.h"

namespace tfswitch {

// These functions set and return the table that a request names.
template <typename Request>
void NameTable(const TableRef& table, Request* request) {
  request->set_table(table.name);
  request->set_table_incarnation(table.incarnation);
}

template <typename Request>
TableRef TableOf(const Request& request) {
  return {request.table(), request.table_incarnation()};
}

v1::TableInfo ToProto(const TableInfo& info);
TableInfo FromProto(const v1::TableInfo& proto);

v1::ShrinkResponse ToProto(const ShrinkReport& report);

v1::ReadUsageResponse ToProto(absl::Span<const UsageOfRow> usage,
                              absl::Span<const KeyState> states);
// InvalidArgument if the message and the spans have different numbers of keys.
absl::Status FromProto(const v1::ReadUsageResponse& proto,
                       absl::Span<UsageOfRow> usage,
                       absl::Span<KeyState> states);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_WIRE_REPORT_CONVERSION_H_
