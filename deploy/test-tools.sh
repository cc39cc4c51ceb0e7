#!/bin/sh
# Installs the programs that tests drive (ffmpeg, nginx with its RTMP module, chromium, GStreamer) where they are missing
# and apt can.
# Never fails: a test whose program is missing says SKIPPED and why.
set -u

missing=""
have() { command -v "$1" >/dev/null 2>&1; }
have ffmpeg && have ffprobe || missing="$missing ffmpeg"
have nginx && [ -e /usr/lib/nginx/modules/ngx_rtmp_module.so ] || missing="$missing nginx libnginx-mod-rtmp"
have chromium || have chromium-browser || have google-chrome || missing="$missing chromium"
gst="import gi; gi.require_version('GstWebRTC', '1.0'); gi.require_version('Gst', '1.0')
from gi.repository import Gst; Gst.init(None); assert Gst.ElementFactory.find('nicesrc')"
if ! /usr/bin/python3 -c "$gst" >/dev/null 2>&1; then
    missing="$missing python3-gi gir1.2-gst-plugins-bad-1.0 gstreamer1.0-plugins-bad gstreamer1.0-plugins-good"
    missing="$missing gstreamer1.0-nice gstreamer1.0-libav"
fi

[ -z "$missing" ] && exit 0

run=""
if [ "$(id -u)" -ne 0 ]; then
    if have sudo && sudo -n true 2>/dev/null; then run="sudo -n"; else
        echo "test-tools: missing$missing; not root and no sudo: the tests that need them will be skipped" >&2
        exit 0
    fi
fi
if ! have apt-get; then
    echo "test-tools: missing$missing; no apt here: the tests that need them will be skipped" >&2
    exit 0
fi

export DEBIAN_FRONTEND=noninteractive
$run apt-get update -qq >/dev/null 2>&1
for package in $missing; do
    # one by one: a package that cannot be had must not keep the others away
    $run apt-get install -y -qq --no-install-recommends "$package" >/dev/null 2>&1 ||
        echo "test-tools: $package could not be installed: the tests that need it will be skipped" >&2
done
# tests start their own nginx; the system's would only hold a port
if [ -n "${run}" ] || [ "$(id -u)" -eq 0 ]; then
    case "$missing" in *nginx*) $run service nginx stop >/dev/null 2>&1 || true ;; esac
fi
exit 0
