#!/usr/bin/env python3
"""Write a container image archive from plain files, without a container tool.

Each LAYER is a directory, or a tar archive, whose content is laid over the
layers before it, owned by root when it comes from a directory. The archive is
what `ctr -n k8s.io images import` takes; images that share layers share them
on the node as well.
"""

import argparse
import hashlib
import io
import json
import tarfile
import tempfile
from pathlib import Path

PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def reset(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Drop what would make two builds of the same tree differ."""
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def pack(tree: Path, archive: Path) -> Path:
    """Pack a directory as a layer; an archive is one already."""
    if tree.is_file():
        return tree
    with tarfile.open(archive, "w") as tar:
        for path in sorted(tree.rglob("*")):
            tar.add(path, arcname=str(path.relative_to(tree)), recursive=False, filter=reset)
    return archive


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path)
    parser.add_argument("name", help="full reference, for example registry.k8s.io/pause:3.10")
    parser.add_argument("layers", type=Path, nargs="+", metavar="LAYER")
    parser.add_argument("--entrypoint", type=json.loads, metavar="JSON", help="a JSON list")
    parser.add_argument("--cmd", type=json.loads, metavar="JSON", help="a JSON list")
    parser.add_argument("--env", action="append", default=[PATH], metavar="KEY=VALUE")
    parser.add_argument("--user", default="")
    parser.add_argument("--workdir", default="/")
    options = parser.parse_args()

    partial = options.archive.with_suffix(".partial")
    with tempfile.TemporaryDirectory(dir=options.archive.parent) as scratch, tarfile.open(partial, "w") as tar:
        digests = []
        for number, tree in enumerate(options.layers):
            layer = pack(tree, Path(scratch, f"{number}.tar"))
            with layer.open("rb") as stream:
                digests.append(hashlib.file_digest(stream, "sha256").hexdigest())
            tar.add(layer, arcname=f"{digests[-1]}/layer.tar", filter=reset)
        config = json.dumps(
            {
                "architecture": "amd64",
                "os": "linux",
                "config": {
                    "Entrypoint": options.entrypoint,
                    "Cmd": options.cmd,
                    "Env": options.env,
                    "User": options.user,
                    "WorkingDir": options.workdir,
                },
                "history": [{"created_by": "mkimage.py"} for _ in digests],
                "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}" for digest in digests]},
            }
        ).encode()
        config_name = f"{hashlib.sha256(config).hexdigest()}.json"
        add(tar, config_name, config)
        layers = [f"{digest}/layer.tar" for digest in digests]
        add(
            tar,
            "manifest.json",
            json.dumps([{"Config": config_name, "RepoTags": [options.name], "Layers": layers}]).encode(),
        )
    partial.rename(options.archive)


if __name__ == "__main__":
    main()
