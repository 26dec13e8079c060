"""Asks a prediction server for scores, as any client of TensorFlow Serving.

    python client.py ADDRESS MODEL [INPUT=VALUE ...]

Values are Python literals: `ids=[[1,2],[3,4]]`. Without values it prints the
inputs and outputs of the model. Needs `pip install tensorflow-serving-api`.
"""

import ast
import sys

import grpc
import tensorflow as tf
from tensorflow_serving.apis import (
    get_model_metadata_pb2,
    predict_pb2,
    prediction_service_pb2_grpc,
)


def signature_of(stub, model: str):
    request = get_model_metadata_pb2.GetModelMetadataRequest()
    request.model_spec.name = model
    request.metadata_field.append("signature_def")
    answer = stub.GetModelMetadata(request, timeout=10)
    signatures = get_model_metadata_pb2.SignatureDefMap()
    answer.metadata["signature_def"].Unpack(signatures)
    return signatures.signature_def["serving_default"]


def main(address: str, model: str, *arguments: str) -> None:
    with grpc.insecure_channel(address) as channel:
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        signature = signature_of(stub, model)
        if not arguments:
            print(signature)
            return
        request = predict_pb2.PredictRequest()
        request.model_spec.name = model
        for argument in arguments:
            name, _, value = argument.partition("=")
            dtype = (
                signature.inputs[name].dtype
                if name in signature.inputs
                else None  # The server's error names the inputs.
            )
            request.inputs[name].CopyFrom(
                tf.make_tensor_proto(ast.literal_eval(value), dtype)
            )
        try:
            response = stub.Predict(request, timeout=10)
        except grpc.RpcError as error:
            sys.exit(f"{error.code().name}: {error.details()}")
        print(f"version {response.model_spec.version.value}")
        for name, tensor in sorted(response.outputs.items()):
            print(f"{name}: {tf.make_ndarray(tensor).tolist()}")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
