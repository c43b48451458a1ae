# The sidecar's image: `docker build -f docker/proxy.Dockerfile -t logprob-sidecar .` from the project's root.
# Any Debian with Python 3.11 to 3.13, its headers, its venv module and pip will do; both stages must use the same one.
ARG BASE_IMAGE=python:3.12.12-slim-bookworm

FROM ${BASE_IMAGE} AS build
WORKDIR /src
# For proxy/walk.pyx; none of it is in the final image.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
# Without pip: the final image can run what is installed, and install nothing.
RUN python3 -m venv --without-pip /opt/logprob-sidecar
# The dependencies change less often than the code, so they get a layer of their own.
COPY pyproject.toml ./
RUN python3 -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
        > requirements.txt \
    && python3 -m pip --python /opt/logprob-sidecar/bin/python install --no-cache-dir -r requirements.txt
COPY README.md LICENSE ./
COPY proxy proxy
COPY trainer_hooks trainer_hooks
RUN python3 -m pip wheel --no-cache-dir --no-deps --wheel-dir wheels . \
    && python3 -m pip --python /opt/logprob-sidecar/bin/python install --no-cache-dir --no-deps wheels/*.whl \
    && /opt/logprob-sidecar/bin/python -c "import proxy.walk"

FROM ${BASE_IMAGE}
LABEL org.opencontainers.image.title="logprob-sidecar" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin sidecar
COPY --from=build /opt/logprob-sidecar /opt/logprob-sidecar
# A container's loopback address is reached by nobody else.
ENV PATH=/opt/logprob-sidecar/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    SIDECAR_HOST=0.0.0.0
# By number, so that Kubernetes can see that it is not root.
USER 10001:10001
EXPOSE 9100
# http.client picks up no proxy from the environment, which urllib would.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s --retries=3 \
    CMD ["python3", "-c", "import http.client, os, sys; c = http.client.HTTPConnection('127.0.0.1', int(os.environ.get('SIDECAR_PORT', 9100)), timeout=4); c.request('GET', '/livez'); sys.exit(c.getresponse().status != 200)"]
ENTRYPOINT ["logprob-sidecar"]
CMD ["serve"]
