"""Log lines as text or as JSON, one object a line, on standard error."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Any

import msgspec

ACCESS = logging.getLogger("foreword.access")
"""One line for each request, at info. No text of a prompt or an answer comes here."""


class TextFormatter(logging.Formatter):
    """`time level logger: message key=value ...`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line without an exception."""
        return super().formatMessage(record) + "".join(f" {k}={v}" for k, v in fields_of(record).items())


class JsonFormatter(logging.Formatter):
    """Time in UTC, level, logger, message, the record's own fields, and an exception's text where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """What was given as `extra={"fields": {...}}`."""
    fields: dict[str, Any] = getattr(record, "fields", {})
    return fields


def logs_are_json() -> bool:
    """Whether this process logs JSON."""
    return any(isinstance(h.formatter, JsonFormatter) for h in logging.getLogger().handlers)


def set_up_logs(level: str, form: str) -> None:
    """Send all loggers' lines to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
