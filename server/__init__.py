"""The control plane: a web server that starts the engine as a child process and shows its worlds to people.

One request's way through the files, in order:

    settings.py    what the process was told at start
    link.py        the engine process: started, watched, restarted; commands out, events in
    sessions.py    all sessions: admission, routing of events, timers     session.py     one of them
    steering.py    a session's prompts and held keys                      history.py     its events, numbered
    broadcast.py   packets of one session to N bounded queues             outputs.py     who takes them beside viewers
    peer.py        one WHEP viewer                                        congestion.py  when a viewer is too slow
    rtmp.py rtmp_wire.py flv.py targets.py     the push to a media server
    recorder.py    fragmented MP4
    auth.py        who may do what                                        problems.py    every error a caller can see
    schemas.py     JSON of the HTTP side                                  messages.py    JSON of the WebSocket
    routes/        thin handlers                                          app.py         puts it together
    metrics.py doctor.py cli.py __main__.py

It imports no torch and of `engine` only `engine.protocol`.
"""

__version__ = "0.1.0"
