# Images of what scripts/wheel has put into dist/; see docs/containers.md.
ARG BASE=python:3.12-slim-bookworm

FROM ${BASE} AS tfswitch
RUN useradd --create-home --uid 10001 tfswitch
COPY dist/*.whl /tmp/
RUN pip install --no-cache-dir /tmp/tfswitch_ps-*.whl && rm /tmp/*.whl
COPY scripts/container_health.py /usr/local/lib/tfswitch/

# A parameter server, without TensorFlow.
FROM tfswitch AS server
RUN install --directory --owner=tfswitch /data
USER tfswitch
WORKDIR /data
VOLUME /data
EXPOSE 7077
# While it restores its rows, it does not serve.
HEALTHCHECK --interval=10s --timeout=10s --start-period=10m \
  CMD ["python3", "/usr/local/lib/tfswitch/container_health.py", "7077"]
# A flag that is given again takes the place of these.
ENTRYPOINT ["tfswitch-server", "--address=0.0.0.0:7077", "--data_dir=/data", \
  "--tls_cert=/run/secrets/server.pem", "--tls_key=/run/secrets/server.key", \
  "--token_file=/run/secrets/tokens"]

FROM tfswitch AS tensorflow
ARG TENSORFLOW=tensorflow-cpu==2.21.*
RUN pip install --no-cache-dir "${TENSORFLOW}" && python3 -c "import tfswitch"

# A prediction server. /models has versions of a model: folders with numbers.
FROM tensorflow AS serving
RUN install --directory /models
USER tfswitch
VOLUME /models
EXPOSE 8500
HEALTHCHECK --interval=10s --timeout=10s --start-period=10m \
  CMD ["python3", "/usr/local/lib/tfswitch/container_health.py", "8500"]
ENTRYPOINT ["tfswitch-serving", "--address=0.0.0.0:8500", \
  "--model_dir=/models", \
  "--tls_cert=/run/secrets/server.pem", "--tls_key=/run/secrets/server.key", \
  "--token_file=/run/secrets/tokens"]

# Python with TensorFlow, for programs that train.
FROM tensorflow AS train
RUN install --directory --owner=tfswitch /training
USER tfswitch
WORKDIR /training
VOLUME /training
ENTRYPOINT ["python3"]
