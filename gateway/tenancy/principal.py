"""Who a key speaks for, and what may be done with it: one record made of key, project and organisation.

Knows no store, no request and no counting.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from noria.gateway.errors import Forbidden, InvalidKey
from noria.gateway.tenancy.records import AdminKey, ApiKey, Budget, Limits, Organization, Project, Rates, is_inside

ORGANIZATION = "organization"
"""How an organisation names itself among those that limits and budgets are on."""


@dataclass(frozen=True, slots=True)
class Subject:
    """One that limits and budgets are on: a key or a project by its id, or the organisation."""

    id: str
    limits: Limits
    budgets: tuple[Budget, ...]

    def rates(self, model: str) -> list[tuple[str, Rates]]:
        """What holds for a request of this model, each with the suffix of its counters' names."""
        found: list[tuple[str, Rates]] = [("", self.limits)]
        if model in self.limits.models:
            found.append((f"/{model}", self.limits.models[model]))
        return found


@dataclass(frozen=True, slots=True)
class Principal:
    """`version` is that of the organisation's directory when it was read."""

    organization: Organization
    project: Project
    key: ApiKey
    version: str

    @property
    def account(self) -> str:
        """How the ledger names whom a request is charged to."""
        return f"{self.organization.id}/{self.project.id}/{self.key.id}"

    @property
    def subjects(self) -> tuple[Subject, Subject, Subject]:
        """The narrowest first."""
        return (
            Subject(self.key.id, self.key.limits, self.key.budgets),
            Subject(self.project.id, self.project.limits, self.project.budgets),
            Subject(ORGANIZATION, self.organization.limits, self.organization.budgets),
        )

    @property
    def is_limited(self) -> bool:
        return any(subject.limits != _NO_LIMITS or subject.budgets for subject in self.subjects)

    def check_request(self, path: str, address: str | None, headers: Mapping[str, str]) -> None:
        """Raises `InvalidKey` and `Forbidden`: where it comes from, whom it names, where it goes."""
        networks = self.key.ip_allow_list
        if networks and not is_inside(address, networks):
            raise InvalidKey("Your IP address is not on this key's allow list.", code="ip_not_authorized")
        check_named(headers, self.organization.id, self.project.id)
        if self.key.endpoints is not None and endpoint_of(path) not in self.key.endpoints:
            message = f"This API key may not use '{endpoint_of(path)}', but {_listed(self.key.endpoints)}."
            raise Forbidden(message, code="insufficient_permissions")

    def check_model(self, model_id: str, aliases: Collection[str]) -> None:
        """Raises `Forbidden` for a model that key or project may not use, whichever of its names they list."""
        for whose, allowed in ((f"Project '{self.project.id}'", self.project.models), ("This key", self.key.models)):
            if allowed is not None and not {model_id, *aliases} & set(allowed):
                message = f"{whose} does not have access to model '{model_id}'."
                raise Forbidden(message, param="model", code="model_not_found")

    def may_use(self, model_id: str, aliases: Collection[str]) -> bool:
        try:
            self.check_model(model_id, aliases)
        except Forbidden:
            return False
        return True

    def check_tier(self, tier: str) -> None:
        """Raises `Forbidden`."""
        for whose, allowed in (("project", self.project.service_tiers), ("key", self.key.service_tiers)):
            if allowed is not None and tier not in allowed:
                message = f"The service tier '{tier}' is not allowed for this {whose}, but {_listed(allowed)}."
                raise Forbidden(message, param="service_tier", code="service_tier_not_allowed")


@dataclass(frozen=True, slots=True)
class Administrator:
    """An admin key, for one organisation or all."""

    organization: str
    key: AdminKey

    @property
    def is_instance_wide(self) -> bool:
        return self.key.scope == "instance"


_NO_LIMITS = Limits()


def check_named(headers: Mapping[str, str], organization: str, project: str | None) -> None:
    """Raises `InvalidKey` where a request's headers name another organisation or project than its key's."""
    for header, own, what in (
        ("openai-organization", organization, "organization"),
        ("openai-project", project, "project"),
    ):
        named = headers.get(header, "").strip()
        if named and own is not None and named != own:
            name = header.title().replace("Openai", "OpenAI")
            raise InvalidKey(f"{name} header should match {what} for API key.", code=f"mismatched_{what}")


def endpoint_of(path: str) -> str:
    """The first word of a path behind its version."""
    words = path.strip("/").split("/")
    return words[1] if len(words) > 1 and words[0] in ("v1", "v2") else words[0]


def _listed(names: Collection[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "nothing"
