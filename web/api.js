/* The server's HTTP side: one request at a time, with the right to make it, and faults by name.
   Knows addresses and problem details; knows nothing of pictures, sockets or the page. */

/** What the server, or the way to it, answered instead of what was asked for. */
export class Fault extends Error {
  constructor(code, detail, { status = 0, retryAfterS = 0 } = {}) {
    super(detail);
    this.code = code;
    this.status = status;
    this.retryAfterS = retryAfterS;
  }
}

const TOKEN_KEY = "inferix.token";

/** Who this page is to the server: a signed link's access from the address, else a token typed earlier. */
export class Credentials {
  constructor(address = location.href) {
    this.access = new URL(address).searchParams.get("access") ?? "";
    this.token = this.access || sessionStorage.getItem(TOKEN_KEY) || "";
  }

  remember(token) {
    this.access = "";
    this.token = token;
    sessionStorage.setItem(TOKEN_KEY, token);
  }

  headers() {
    return this.token ? { Authorization: `Bearer ${this.token}` } : {};
  }

  /** WebSocket cannot carry headers: the token travels as a second subprotocol. */
  protocols() {
    return this.token ? ["inferix.v1", `bearer.${this.token}`] : ["inferix.v1"];
  }
}

export class Api {
  constructor(credentials, deadlineMs = 15_000) {
    this.credentials = credentials;
    this.deadlineMs = deadlineMs;
  }

  get(path) {
    return this.json("GET", path);
  }

  post(path, body, headers = {}, deadlineMs = this.deadlineMs) {
    return this.json("POST", path, body, headers, deadlineMs);
  }

  delete(path) {
    return this.json("DELETE", path);
  }

  async json(method, path, body, headers = {}, deadlineMs = this.deadlineMs) {
    const typed = body === undefined ? headers : { "Content-Type": "application/json", ...headers };
    const text = body === undefined ? undefined : JSON.stringify(body);
    const response = await this.send(method, path, text, typed, deadlineMs);
    return response.status === 204 ? null : response.json();
  }

  /** Answers the response when it is good; throws a Fault when it is not, or when none came. */
  async send(method, path, body, headers = {}, deadlineMs = this.deadlineMs) {
    let response;
    try {
      response = await fetch(path, {
        method,
        body,
        headers: { ...this.credentials.headers(), ...headers },
        signal: AbortSignal.timeout(deadlineMs),
        cache: "no-store",
      });
    } catch (error) {
      const late = error.name === "TimeoutError";
      throw new Fault(
        "unreachable",
        late ? `no answer within ${deadlineMs / 1000} s` : "the server cannot be reached",
      );
    }
    if (!response.ok) throw await faultOf(response);
    return response;
  }

  /** For the moment the page goes away: nobody is left to hear the answer. */
  deleteOnLeaving(path) {
    fetch(path, { method: "DELETE", keepalive: true, headers: this.credentials.headers() }).catch(() => {});
  }
}

/** A name nobody else uses; `crypto.randomUUID` is missing on plain-HTTP addresses. */
export function freshId(prefix) {
  const bytes = crypto.getRandomValues(new Uint8Array(8));
  return `${prefix}-${Array.from(bytes, (b) => b.toString(16).padStart(2, "0")).join("")}`;
}

async function faultOf(response) {
  const retryAfterS = Number(response.headers.get("Retry-After")) || 0;
  const problem = await response.json().catch(() => ({}));
  const detail = (problem.errors ?? []).map((e) => `${e.where}: ${e.message}`).join("; ") || problem.detail;
  return new Fault(problem.code ?? `http-${response.status}`, detail ?? response.statusText, {
    status: response.status,
    retryAfterS,
  });
}
