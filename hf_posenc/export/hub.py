"""Uploads an export to a repository on the hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import RemoteEntryNotFoundError

from hf_posenc.checkpoint.saving import upload_of
from hf_posenc.export.records import MANIFEST, ExportReport, files_in


@dataclass(frozen=True)
class Upload:
    """Where an export is uploaded to.

    Args:
        repository: hub id.
        private: whether a new repository is private; `None` for the default of its owner.
        token: access token; `None` for the stored one.
        revision: branch, which is created if it does not exist; `None` for the default branch.
        create_pr: whether to open a pull request instead of a commit to the branch.
        commit_message: its title.
    """

    repository: str
    private: bool | None = None
    token: str | bool | None = None
    revision: str | None = None
    create_pr: bool = False
    commit_message: str | None = None

    def full_name(self) -> str:
        """The hub id with its owner: a name without one belongs to the owner of the token."""
        if "/" in self.repository:
            return self.repository
        return HfApi(token=self.token).get_full_repo_name(self.repository)

    def send(self, report: ExportReport) -> None:
        """Uploads all files of an export in one commit, so that the repository never has a part of it.

        An exception gets a note that says how to upload the folder later.
        """
        api = HfApi(token=self.token)
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            CommitOperationAdd(path_in_repo=name, path_or_fileobj=report.folder / name) for name in report.files
        ]
        message = self.commit_message or f"Export of {report.scheme} to {report.target}"
        with upload_of(report.folder, self.repository):
            name = api.create_repo(self.repository, private=self.private, exist_ok=True).repo_id
            if self.revision is not None:
                api.create_branch(name, branch=self.revision, exist_ok=True)
            operations += [CommitOperationDelete(path) for path in self._outdated(api, name, report)]
            api.create_commit(
                name, operations, commit_message=message, revision=self.revision, create_pr=self.create_pr
            )

    def _outdated(self, api: HfApi, name: str, report: ExportReport) -> list[str]:
        """Files in the repository that belong to an earlier export only. Some programs would load them."""
        try:
            earlier = files_in(Path(api.hf_hub_download(name, MANIFEST, revision=self.revision)))
        except RemoteEntryNotFoundError:
            return []
        there = api.list_repo_files(name, revision=self.revision)
        return sorted((set(there) & earlier) - set(report.files))
