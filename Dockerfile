# Two targets: `docker build --target cpu .` and `docker build --target cuda .`
# Run with --network host, or publish a UDP port range: see docs/networking.md.

FROM python:3.11-slim AS base
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /app
RUN useradd --create-home inferix && mkdir /recordings && chown inferix /recordings
COPY pyproject.toml README.md LICENSE ./
COPY engine engine
COPY server server
COPY web web
EXPOSE 8000/tcp
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/healthz', timeout=2)"]
ENTRYPOINT ["inferix"]
CMD ["serve", "--model", "tiny-world", "--host", "0.0.0.0", "--port", "8000", "--record-dir", "/recordings"]

FROM base AS cpu
ARG TORCH="torch==2.13.0"
ARG TORCH_INDEX=""
RUN pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$TORCH" && pip install -e .
USER inferix

FROM base AS cuda
RUN pip install "torch>=2.9,<2.14" && pip install -e ".[models]"
USER inferix
