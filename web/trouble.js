/* What is going on, in words: from the states of the server, the session, the socket and the picture to one status line
   and, when the picture cannot be seen, one notice that says what happened and what to do. A pure function. */

const TOKEN = new Set(["token-required", "token-unknown", "link-expired"]);

/** Its argument is what main.js calls the situation.
    @returns {{phase: string, status: string, notice: null | {title, text, steps?, wantsToken?, actions?}}} */
export function diagnose(situation) {
  const seen = judge(situation);
  if (seen.notice?.actions && !situation.mayCreate)
    seen.notice.actions = seen.notice.actions.filter(({ does }) => does !== "create");
  return seen;
}

function judge(situation) {
  const { opening, session, socket, picture, engine } = situation;
  if (opening.fault) return ofFault(opening.fault, waitText(opening.retryAt, situation.now), engine);
  if (socket?.state === "closed" && socket.why) return ofClosedSocket(socket.why, session);
  if (session && ["ended", "failed", "stopping"].includes(session.state)) return over(session);
  if (session?.state === "queued")
    return engine.state === "ready"
      ? queued(session)
      : unready(engine, "Your world starts by itself when it is ready.", []);
  if (socket?.state === "waiting" && (picture.state !== "playing" || !situation.isMoving))
    return lostServer(socket, situation.now);
  if (session?.state === "starting" && session.restarts > 0) return restarting(session);
  if (picture.state === "refused" || picture.state === "waiting") return ofPicture(picture, situation);
  if (opening.step !== "done" || picture.state !== "playing") return connecting(opening.step);
  return playing(situation);
}

function playing({ session, socket, now, isMoving, isSlow }) {
  if (socket.state !== "open")
    return {
      phase: "late",
      status: `Steering is cut off. ${waitText(socket.retryAt, now) || "Reconnecting"}`,
      notice: null,
    };
  if (session.state === "paused") return { phase: "paused", status: "Paused", notice: null };
  if (!isMoving) return { phase: "late", status: "Waiting for the next picture", notice: null };
  return { phase: "playing", status: isSlow ? "Live, slowed down" : "Live", notice: null };
}

const STEPS = ["server", "world", "picture"];
const STEP_NAMES = { server: "Finding the server", world: "Starting a world", picture: "Opening the picture" };

function connecting(step) {
  const at = step === "done" ? STEPS.length - 1 : STEPS.indexOf(step);
  const steps = STEPS.map((name, i) => ({
    text: STEP_NAMES[name],
    state: i < at ? "done" : i === at ? "doing" : "todo",
  }));
  return { phase: "connecting", status: "Connecting", notice: { title: "One moment", text: "", steps } };
}

function queued(session) {
  const place =
    session.queue_position === 1 ? "You are next" : `You are number ${session.queue_position ?? "…"} in line`;
  return busy("Every place is taken", `${place}. Your world starts by itself as soon as one is free.`, [
    { label: "Watch another world", does: "worlds" },
  ]);
}

function unready({ state, reason }, then, actions) {
  if (state !== "down") return busy("The engine is warming up", `The model is being loaded. ${then}`, actions);
  return trouble("No engine", "The engine does not run", `${sentence(reason)} ${then}`.trim(), actions);
}

function restarting(session) {
  const text = session.reason
    ? `${sentence(session.reason)} Your world begins again with what you last said.`
    : "Your world begins again with what you last said.";
  return { phase: "recovering", status: "Restarting", notice: { title: "The engine is starting again", text } };
}

function over(session) {
  const actions = [
    { label: "Start a new world", does: "create" },
    { label: "See other worlds", does: "worlds" },
  ];
  if (session.state === "failed")
    return trouble(
      "Stopped",
      "This world has broken down",
      sentence(session.reason) || "The engine gave no reason.",
      actions,
    );
  return trouble("Ended", "This world has ended", sentence(session.reason), actions);
}

function lostServer(socket, now) {
  const text = `Is it still running, and is this device still on the network? ${waitText(socket.retryAt, now)}`;
  return {
    phase: "recovering",
    status: "Reconnecting",
    notice: { title: "The server is out of reach", text, actions: [{ label: "Try now", does: "retry" }] },
  };
}

function ofClosedSocket(why, session) {
  if (why === "token") return token("token-unknown");
  if (why === "forbidden")
    return trouble("Refused", "You may not watch this world", "The token or link you have does not open it.", [
      { label: "See other worlds", does: "worlds" },
    ]);
  if (why === "gone") return gone();
  return over({ state: "ended", reason: "", ...session });
}

function gone() {
  return trouble("Ended", "This world is no more", "It ended, or the server has been started anew since.", [
    { label: "Start a new world", does: "create" },
    { label: "See other worlds", does: "worlds" },
  ]);
}

function ofPicture(picture, { now, host }) {
  const { fault } = picture;
  const again = waitText(picture.retryAt, now);
  const retry = [{ label: "Try now", does: "retry" }];
  if (picture.state === "refused" && fault.code !== "no-common-codec") return ofFault(fault, "");
  if (fault.code !== "no-media" && fault.code !== "picture-lost") return ofFault(fault, again);
  if (fault.code === "no-media" && picture.failures > 1)
    return { phase: "recovering", status: "No picture", notice: blocked(host, again, retry) };
  return {
    phase: "recovering",
    status: "Reconnecting",
    notice: { title: "The picture was lost", text: again || "Getting it back.", actions: retry },
  };
}

function blocked(host, again, actions) {
  const what = `The server can be reached, but its video cannot: something on the way to ${host} lets no UDP through.`;
  const why = "Often it is a VPN, a firewall, an SSH tunnel, or a container without its UDP ports.";
  const advice = "Try another network; for whoever runs the server there is docs/networking.md.";
  return { title: "The picture does not get through", text: `${what} ${why} ${advice} ${again}`, actions };
}

/** Refusals by their code; `again` says when the page tries by itself. */
function ofFault(fault, again, engine) {
  if (TOKEN.has(fault.code)) return token(fault.code);
  const retry = again ? [{ label: "Try now", does: "retry" }] : [];
  const worlds = [...retry, { label: "See other worlds", does: "worlds" }];
  const named = {
    unreachable: () => ({
      phase: "recovering",
      status: "No server",
      notice: {
        title: "The server does not answer",
        text: `Is it running, and is this device on the same network? ${again}`,
        actions: retry,
      },
    }),
    "engine-not-ready": () => unready(engine ?? { state: "starting" }, again, retry),
    "engine-timeout": () => busy("The engine takes its time", `It did not answer. ${again}`, retry),
    stopping: () => busy("The server is shutting down", `It takes no new worlds. ${again}`, retry),
    capacity: () => busy("Every place is taken", `${sentence(fault.message)} ${again}`, worlds),
    "viewer-limit": () => busy("This world is full", `As many people are watching as it can hold. ${again}`, worlds),
    "too-many-sessions": () =>
      busy("You have as many worlds as you may", `End one of them under Worlds, then start another. ${again}`, worlds),
    "too-fast": () => busy("Too fast", `The server asks for a pause. ${again}`, retry),
    "nothing-on": () => busy("Nothing is on right now", `You may watch here, but not start a world. ${again}`, retry),
    "no-address": () =>
      busy(
        "The server has no free port for another viewer",
        `Whoever runs it finds more in docs/networking.md. ${again}`,
        retry,
      ),
    "no-common-codec": () =>
      trouble(
        "No picture",
        "This browser cannot show the picture",
        "It plays neither H.264 nor VP8. A current Chrome, Edge, Firefox or Safari does.",
        [],
      ),
    "session-not-found": gone,
    "session-over": gone,
    "origin-not-allowed": () =>
      trouble(
        "Refused",
        "The server does not serve this address",
        `It has to be told with --allow-origin ${location.origin}.`,
        [],
      ),
  };
  return (
    named[fault.code] ??
    (() => trouble("Refused", "The server says no", `${sentence(fault.message)} ${again}`.trim(), worlds))
  )();
}

function token(code) {
  const [title, text] = {
    "token-required": ["This server asks for a token", "Enter the one you were given."],
    "token-unknown": ["The server does not know this token", "Check it, or ask for another."],
    "link-expired": ["This link has expired", "Ask for a new one, or enter a token."],
  }[code];
  return { phase: "trouble", status: "Locked", notice: { title, text, wantsToken: true } };
}

function busy(title, text, actions) {
  return { phase: "busy", status: "Waiting", notice: { title, text: text.trim(), actions } };
}

function trouble(status, title, text, actions) {
  return { phase: "trouble", status, notice: { title, text, actions } };
}

function waitText(at, now) {
  if (!at) return "";
  const seconds = Math.ceil((at - now) / 1000);
  return seconds > 0 ? `Trying again in ${seconds} s.` : "Trying again now.";
}

function sentence(text) {
  if (!text) return "";
  const capital = text[0].toUpperCase() + text.slice(1);
  return /[.!?]$/.test(capital) ? capital : `${capital}.`;
}
