// The interface between the two halves of a prediction server: the program,
// which links TensorFlow, and libtfswitch_serving_rpc.so, which links the
// distribution's gRPC and protobuf. TensorFlow exports symbols of its own gRPC,
// protobuf and Abseil, so the two must not meet in one namespace of symbols.
// The library is opened with RTLD_DEEPBIND and exports only ServingRpc_GetApi,
// and only the C types of this header are shared.
//
// The caller owns what it passes, in either direction; nothing is retained
// after a call returns. Status codes are those of gRPC, which are absl's. The
// functions may be called from any thread. Nothing throws.

#ifndef CC_PREDICTOR_SERVING_RPC_H_
#define CC_PREDICTOR_SERVING_RPC_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Incremented with each change of this header.
#define SERVING_RPC_API_VERSION 2

typedef struct ServingBytes {
  const char* data;  // No NUL at the end.
  size_t size;
} ServingBytes;

typedef struct ServingTensor {
  ServingBytes name;
  int32_t dtype;  // A number of tensorflow.DataType.
  const int64_t* dims;
  size_t num_dims;
  // Row-major, any alignment; an array of ServingBytes for DT_STRING.
  const void* values;
  size_t num_values;
} ServingTensor;

// The model that a request is for. Empty: the server chooses.
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

// The place for a handler's answer. Strings and tensors are copied.
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
} ServingHandler;

typedef struct ServingRpcOptions {
  const char* address;  // "host:port" (port 0: any free one), "unix:/path".
  // Longest message in either direction, and largest tensor of a request.
  int64_t max_message_bytes;
  // The most predictions that run at the same time; each holds a thread. Others
  // get RESOURCE_EXHAUSTED.
  int32_t max_requests;
  // Paths; each may be empty. cc/rpc/access_control.h says who may call.
  const char* tls_cert;
  const char* tls_key;
  const char* tls_ca;
  const char* token_file;
  int32_t is_insecure;
  int32_t has_reflection;
} ServingRpcOptions;

typedef struct ServingRpcServer ServingRpcServer;

typedef struct ServingRpcApi {
  // Starts to listen, with NOT_SERVING as health. The handler's context must
  // live until stop() returns. On failure returns NULL, writes the reason to
  // `error`, cut to `error_size` bytes with the NUL, and sets *code:
  // INVALID_ARGUMENT for a bad option or file, UNAVAILABLE if the address
  // cannot be bound.
  ServingRpcServer* (*start)(const ServingRpcOptions* options,
                             const ServingHandler* handler, int32_t* code,
                             char* error, size_t error_size);
  // The bound address, with the real port. Lives as long as the server.
  const char* (*address)(const ServingRpcServer* server);
  // Sets the answer of the health service.
  void (*set_serving)(ServingRpcServer* server, int32_t serving);
  // Says NOT_SERVING, refuses new requests, and lets running ones end for at
  // most `grace_ms`; then their clients see them cancelled. Frees the server
  // when the last handler has returned.
  void (*stop)(ServingRpcServer* server, int64_t grace_ms);
} ServingRpcApi;

// NULL if the library has another version. Lives as long as the library.
typedef const ServingRpcApi* (*ServingRpc_GetApiFn)(uint32_t version);

#ifdef __cplusplus
}
#endif

#endif  // CC_PREDICTOR_SERVING_RPC_H_
