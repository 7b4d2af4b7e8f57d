"""A proxy: whether it answers, and which of its instances it may use."""

from mooncake.doctor import web
from mooncake.doctor.findings import Finding, fail, ok, warn

AREA = "proxy"


def look_at_proxy(url: str, limit: float) -> tuple[list[Finding], list[str]]:
    """Findings, and the URLs of its instances."""
    subject = url.removeprefix("http://")
    try:
        status = web.get_json(f"{url.rstrip('/')}/status", limit, cluster=True)
        instances = [(half, one) for half in ("prefill", "decode") for one in status[half]]
    except web.NoAnswerError as error:
        return [fail(AREA, subject, f"it does not answer: {error}", "Start mooncake_proxy, or correct the URL.")], []
    except (KeyError, TypeError):
        return [fail(AREA, subject, "what answers is no mooncake_proxy", "Correct the URL.")], []
    found = [ok(AREA, subject, f"answers; {len(status['prefill'])} prefill and {len(status['decode'])} decode")]
    if not status["decode"]:
        found.append(fail(AREA, subject, "it has no decode instance: it answers every request with 503", "Add one."))
    for half, one in instances:
        if one["state"] != "ready":
            why = one.get("last_error") or "it was not healthy yet"
            found.append(warn(AREA, f"{half} {one['url']}", f"{one['state']}: {why}", "Look at that instance's log."))
    return found, [one["url"] for _, one in instances]
