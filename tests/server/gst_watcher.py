"""A WHEP viewer made with GStreamer's webrtcbin, run by the system's Python: prints how many frames it decoded.

python3 gst_watcher.py URL h264|vp8 FRAMES
"""

from __future__ import annotations

import sys
import urllib.request
from typing import Any

import gi  # type: ignore[import-not-found,import-untyped,unused-ignore]

gi.require_version("Gst", "1.0")
gi.require_version("GstWebRTC", "1.0")
gi.require_version("GstSdp", "1.0")
from gi.repository import GLib, Gst, GstSdp, GstWebRTC  # type: ignore[import-not-found,import-untyped,unused-ignore]  # noqa: E402

CAPS = {
    "h264": "application/x-rtp,media=video,encoding-name=H264,payload=102,clock-rate=90000,"
    "packetization-mode=(string)1,profile-level-id=(string)42e01f",
    "vp8": "application/x-rtp,media=video,encoding-name=VP8,payload=96,clock-rate=90000",
}


class Watcher:
    def __init__(self, url: str, codec: str, wanted: int) -> None:
        self._url = url
        self._wanted = wanted
        self.frames = 0
        self.loop = GLib.MainLoop()
        self._pipeline = Gst.Pipeline.new()
        self._webrtc = Gst.ElementFactory.make("webrtcbin")
        self._webrtc.set_property("bundle-policy", GstWebRTC.WebRTCBundlePolicy.MAX_BUNDLE)
        self._pipeline.add(self._webrtc)
        self._webrtc.connect("pad-added", self._on_pad)
        self._webrtc.connect("notify::ice-gathering-state", self._on_gathering)
        direction = GstWebRTC.WebRTCRTPTransceiverDirection.RECVONLY
        self._webrtc.emit("add-transceiver", direction, Gst.Caps.from_string(CAPS[codec]))

    def run(self) -> None:
        self._pipeline.set_state(Gst.State.PLAYING)
        self._webrtc.emit("create-offer", None, Gst.Promise.new_with_change_func(self._on_offer, None))
        GLib.timeout_add_seconds(20, self.loop.quit)
        self.loop.run()
        self._pipeline.set_state(Gst.State.NULL)

    def _on_offer(self, promise: Any, _: object) -> None:
        reply = promise.get_reply()
        text = reply.get_value("offer").sdp.as_text()
        self._describe("set-local-description", GstWebRTC.WebRTCSDPType.OFFER, text)

    def _on_gathering(self, *_: object) -> None:
        if self._webrtc.get_property("ice-gathering-state") == GstWebRTC.WebRTCICEGatheringState.COMPLETE:
            GLib.idle_add(self._post)

    def _post(self) -> bool:
        offer = self._webrtc.get_property("local-description").sdp.as_text()
        request = urllib.request.Request(self._url, offer.encode(), {"Content-Type": "application/sdp"})
        with urllib.request.urlopen(request) as response:
            answer = response.read().decode()
        self._describe("set-remote-description", GstWebRTC.WebRTCSDPType.ANSWER, answer)
        return False

    def _describe(self, signal: str, kind: Any, text: str) -> None:
        _, message = GstSdp.SDPMessage.new_from_text(text)
        self._kept = GstWebRTC.WebRTCSessionDescription.new(kind, message)  # the binding frees it too early
        self._webrtc.emit(signal, self._kept, Gst.Promise.new())

    def _on_pad(self, _: object, pad: Any) -> None:
        if pad.get_direction() != Gst.PadDirection.SRC:
            return
        decode, sink = Gst.ElementFactory.make("decodebin"), Gst.ElementFactory.make("fakesink")
        sink.set_property("signal-handoffs", True)
        sink.set_property("sync", False)
        sink.connect("handoff", self._on_frame)
        for element in (decode, sink):
            self._pipeline.add(element)
            element.sync_state_with_parent()
        decode.connect("pad-added", lambda _, decoded: decoded.link(sink.get_static_pad("sink")))
        pad.link(decode.get_static_pad("sink"))

    def _on_frame(self, *_: object) -> None:
        self.frames += 1
        if self.frames >= self._wanted:
            self.loop.quit()


if __name__ == "__main__":
    Gst.init(None)
    watcher = Watcher(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    watcher.run()
    print(watcher.frames)
