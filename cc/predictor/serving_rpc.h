// The interface between the two halves of a prediction server: the program,
// which links TensorFlow, and libtfswitch_serving_rpc.so, which links the
// distribution's gRPC and protobuf. TensorFlow exports symbols of its own gRPC,
// protobuf and Abseil, so the two must not be in one namespace of symbols. The
// library is opened with RTLD_DEEPBIND and exports only ServingRpc_GetApi, and
// only the C types of this header are shared.
//
// In both directions the caller owns the arguments of a call, and the called
// function keeps no pointers to them. Status codes are those of gRPC, which
// equal those of absl. The functions may be called from any thread. They never
// throw.

#ifndef CC_PREDICTOR_SERVING_RPC_H_
#define CC_PREDICTOR_SERVING_RPC_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Incremented with each change of this header.
#define SERVING_RPC_API_VERSION 4

typedef struct ServingBytes {
  const char* data;  // No NUL at the end.
  size_t size;
} ServingBytes;

typedef struct ServingTensor {
  ServingBytes name;
  int32_t dtype;  // A number of tensorflow.DataType.
  const int64_t* dims;
  size_t num_dims;
  // The values in row-major order; the memory may have any alignment. For
  // DT_STRING this is an array of ServingBytes.
  const void* values;
  size_t num_values;
} ServingTensor;

// The model of a request. Without a signature, the server chooses one.
typedef struct ServingModelSpec {
  ServingBytes name;
  ServingBytes signature;
  ServingBytes version_label;
  int64_t version;  // -1: any.
} ServingModelSpec;

typedef struct ServingRequest {
  ServingModelSpec model;
  const ServingTensor* inputs;
  size_t num_inputs;
  const ServingBytes* outputs;  // The wanted ones; none: all.
  size_t num_outputs;
  int64_t timeout_ms;  // Greater than 0; 0: none.
} ServingRequest;

// States of a version: numbers of tensorflow.serving.ModelVersionStatus.State.
#define SERVING_STATE_LOADING 20
#define SERVING_STATE_AVAILABLE 30
#define SERVING_STATE_END 50

// A handler answers by calling these functions. They copy strings and tensors.
typedef struct ServingAnswer {
  void* answer;  // The first argument of the functions.
  void (*set_error)(void* answer, int32_t code, ServingBytes message);
  // The model that answers; for Predict and GetModelMetadata.
  void (*set_model)(void* answer, int64_t version, ServingBytes signature);
  // For Predict.
  void (*add_output)(void* answer, const ServingTensor* output);
  // For GetModelMetadata: a serialized tensorflow.SignatureDef.
  void (*add_signature)(void* answer, ServingBytes name, ServingBytes def);
  // For GetModelStatus.
  void (*add_version)(void* answer, int64_t version, int32_t state,
                      int32_t code, ServingBytes message);
} ServingAnswer;

typedef struct ServingNumbers {
  int64_t version;  // -1: no model is loaded yet.
  // When the rows that are served were exported, in milliseconds since 1970. 0:
  // the model has no exports.
  int64_t data_ms;
} ServingNumbers;

// The functions that answer requests. They are called from many threads at
// once.
typedef struct ServingHandler {
  void* context;  // First argument of the functions.
  void (*predict)(void* context, const ServingRequest* request,
                  const ServingAnswer* answer);
  void (*get_metadata)(void* context, const ServingModelSpec* model,
                       const ServingAnswer* answer);
  void (*get_status)(void* context, const ServingModelSpec* model,
                     const ServingAnswer* answer);
  // For metrics. The model's name lives as long as the context.
  ServingBytes (*get_numbers)(void* context, ServingNumbers* numbers);
} ServingHandler;

typedef struct ServingRpcOptions {
  // "host:port" (port 0: any free one) or "unix:/path".
  const char* address;
  // The longest message in either direction, and the largest tensor of a
  // request.
  int64_t max_message_bytes;
  // The most predictions in progress, each of which holds a thread. Further
  // requests get RESOURCE_EXHAUSTED.
  int32_t max_requests;
  // Paths; each may be empty. cc/rpc/access_control.h describes which callers
  // they allow.
  const char* tls_cert;
  const char* tls_key;
  const char* tls_ca;
  const char* token_file;
  int32_t is_insecure;
  int32_t has_reflection;
  // Where metrics and probes are answered over HTTP; empty: nowhere.
  const char* http_address;
} ServingRpcOptions;

typedef struct ServingRpcServer ServingRpcServer;

typedef struct ServingRpcApi {
  // Starts to listen; the health is NOT_SERVING at first. The handler's context
  // must live until stop() returns. On failure returns NULL, writes the reason
  // to `error`, cut to `error_size` bytes including the NUL, and sets *code:
  // INVALID_ARGUMENT for a bad option or file, UNAVAILABLE if the address
  // cannot be bound.
  ServingRpcServer* (*start)(const ServingRpcOptions* options,
                             const ServingHandler* handler, int32_t* code,
                             char* error, size_t error_size);
  // The bound address, with the actual port. The string lives as long as the
  // server.
  const char* (*address)(const ServingRpcServer* server);
  // The same for HTTP; empty if there is none.
  const char* (*http_address)(const ServingRpcServer* server);
  // Sets the answer of the health service and of the page /readyz.
  void (*set_serving)(ServingRpcServer* server, int32_t serving);
  // Sets the health to NOT_SERVING, refuses new requests, and waits at most
  // `grace_ms` until those in progress have ended; then it cancels them. Frees
  // the server when the last handler has returned.
  void (*stop)(ServingRpcServer* server, int64_t grace_ms);
} ServingRpcApi;

// NULL if the library does not support this version of the interface. The
// struct lives as long as the library is loaded.
typedef const ServingRpcApi* (*ServingRpc_GetApiFn)(uint32_t version);

#ifdef __cplusplus
}
#endif

#endif  // CC_PREDICTOR_SERVING_RPC_H_
