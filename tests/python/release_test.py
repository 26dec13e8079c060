"""scripts/release in a small repository, whose tests and builds do nothing."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.programs import ROOT

CHANGELOG = """# Changelog

## 1.2.3 (2026-01-31)

* All is new.

## 1.2.2 (2025-12-31)

* All was new.
"""
WHEEL = "mkdir -p dist; echo same > dist/p-1.2.3-none-any.whl"
TEST = 'echo "tested $* ${TFSWITCH_WHEEL##*/}"'


class Repository:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "scripts").mkdir(parents=True)
        shutil.copy(ROOT / "scripts" / "release", folder / "scripts")
        self.write("pyproject.toml", '[project]\nversion = "1.2.3"\n')
        self.write(".gitignore", "/dist/\n/build*/\n")
        self.write("CHANGELOG.md", CHANGELOG)
        self.script("wheel", WHEEL)
        self.script("test", TEST)
        self.git("init", "--quiet", "--initial-branch=main")
        self.commit()

    def write(self, name: str, text: str) -> None:
        (self._folder / name).write_text(text)

    def script(self, name: str, text: str) -> None:
        self.write(
            f"scripts/{name}",
            f'#!/bin/bash\ncd "$(dirname "$0")/.."\n{text}\n',
        )
        (self._folder / "scripts" / name).chmod(0o755)

    def git(self, *arguments: str) -> str:
        author = {
            f"GIT_{who}_{what}": "nobody@example.com"
            for who in ("AUTHOR", "COMMITTER")
            for what in ("NAME", "EMAIL")
        }
        return subprocess.run(
            ["git", *arguments],
            cwd=self._folder,
            env={**os.environ, **author},
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    def commit(self) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message=Change")

    def release(
        self, *arguments: str, version: str = "1.2.3"
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self._folder / "scripts" / "release", version, *arguments],
            env={**os.environ, "GIT_CONFIG_GLOBAL": str(self._config())},
            capture_output=True,
            text=True,
        )

    def error(self, version: str = "1.2.3") -> str:
        """The one sentence of a release that is refused, with its remedy."""
        result = self.release(version=version)
        assert result.returncode == 1
        assert self.git("tag") == "" or "v1.2.3 exists" in result.stderr
        return result.stderr

    def _config(self) -> Path:
        path = self._folder.with_name("config")
        path.write_text("[user]\nname = nobody\nemail = nobody@example.com\n")
        return path


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "repository")


def test_release_tests_the_wheel_and_makes_an_annotated_tag(
    repository: Repository,
) -> None:
    result = repository.release()

    assert result.returncode == 0, result.stderr
    assert "tested --full p-1.2.3-none-any.whl" in result.stdout
    assert "git push origin main v1.2.3" in result.stdout
    assert "twine upload dist/p-1.2.3-none-any.whl" in result.stdout
    assert repository.git("cat-file", "-t", "v1.2.3") == "tag\n"
    tagged = repository.git("rev-parse", "v1.2.3^{}")
    assert tagged == repository.git("rev-parse", "main")
    assert repository.git("status", "--porcelain") == ""


def test_dry_run_does_all_but_the_tag(repository: Repository) -> None:
    result = repository.release("--dry_run")

    assert result.returncode == 0, result.stderr
    assert "tested --full" in result.stdout
    assert "there is no tag v1.2.3" in result.stdout
    assert repository.git("tag") == ""


def test_skipped_tests_are_said_aloud(repository: Repository) -> None:
    result = repository.release("--skip_tests")

    assert result.returncode == 0, result.stderr
    assert "THE TESTS WERE SKIPPED" in result.stdout
    assert "tested --full" not in result.stdout
    assert "tested tests/wheel" in result.stdout


def test_another_version_than_that_of_the_project_is_refused(
    repository: Repository,
) -> None:
    error = repository.error("1.2.4")

    assert "pyproject.toml has the version 1.2.3, and 1.2.4 is to be" in error


def test_another_branch_is_refused(repository: Repository) -> None:
    repository.git("switch", "--quiet", "--create", "work")

    assert "this is the branch work. Run `git switch main`." in (
        repository.error()
    )


def test_what_is_not_committed_is_named(repository: Repository) -> None:
    repository.write("left.txt", "")

    error = repository.error()

    assert "not committed. Commit or remove them:\n?? left.txt" in error


def test_a_tag_that_exists_is_not_moved(repository: Repository) -> None:
    repository.git("tag", "v1.2.3")

    assert "the tag v1.2.3 exists" in repository.error()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("## 1.2.3 (", "## 1.2.30 (", "has no section for this version"),
        ("## 1.2.3 (2026-01-31)", "## Unreleased", "has no section for this"),
        ("2026-01-31", "soon", "Put a date into the brackets"),
        (
            "* All is new.",
            "### Added",
            "(2026-01-31)' of CHANGELOG.md is empty",
        ),
        (
            "## 1.2.3",
            "## Unreleased\n\n* More.\n\n## 1.2.3",
            "has entries under '## Unreleased'. Move them to '## 1.2.3 (2026",
        ),
    ],
)
def test_changelog_must_have_a_dated_section_with_entries(
    old: str, new: str, message: str, repository: Repository
) -> None:
    repository.write("CHANGELOG.md", CHANGELOG.replace(old, new, 1))
    repository.commit()

    assert message in repository.error()


def test_wheels_that_differ_are_refused(repository: Repository) -> None:
    repository.script("wheel", f"{WHEEL}; pwd >> dist/p-1.2.3-none-any.whl")
    repository.commit()

    assert "the two wheels in build-release/ differ" in repository.error()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("wheel", "the wheel was not built"),
        ("test", "scripts/test --full fails"),
    ],
)
def test_a_step_that_fails_ends_the_release(
    script: str, message: str, repository: Repository
) -> None:
    repository.script(script, "exit 1")
    repository.commit()

    assert message in repository.error()


def test_a_commit_meanwhile_ends_the_release(repository: Repository) -> None:
    repository.script("test", "touch new.txt")
    repository.commit()

    assert "the checkout has changed meanwhile" in repository.error()
