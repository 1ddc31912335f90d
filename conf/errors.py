"""The one exception that means "the user can fix this"."""


class UserError(Exception):
    """A mistake the user can mend, told in one line: what is wrong, where, what to do.

    Entry points print it as one line and exit with code 2; a traceback is shown only with DRAFTSMITH_DEBUG=1.
    """


class ConfigError(UserError):
    """An impossible configuration value; the message starts with the key's full path."""


def require(ok: bool, key: str, value: object, allowed: str) -> None:
    """Raise ConfigError unless `ok`: `key` is the full path, `allowed` says the allowed range."""
    if not ok:
        raise ConfigError(f"{key} = {value!r} is not allowed; allowed: {allowed}")
