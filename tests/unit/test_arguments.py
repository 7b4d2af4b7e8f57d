"""What the commands say to a mistyped command line."""

import pytest

from mooncake.cli import client, commands


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["up", "--siez", "1GB"], "mooncake up: the flag --siez is unknown (did you mean --size?); mooncake up --help"),
        (["up", "--siz=1GB"], "mooncake up: the flag --siz is unknown (did you mean --size?); mooncake up --help"),
        (["up", "4GB"], 'mooncake up: the argument "4GB" is not expected; mooncake up --help'),
        (
            ["up", "--port", "x"],
            'mooncake up: argument --port: expected a whole number, but found "x"; mooncake up --help',
        ),
        (["down"], "mooncake: argument COMMAND: invalid choice: 'down'"),
        ([], "mooncake: the following arguments are required: COMMAND"),
    ],
)
def test_mooncake(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["mooncake", *arguments])
    one_sentence(commands.main, message, capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hots=h"], "mooncake_client: the flag --hots is unknown (did you mean --host?); mooncake_client --help"),
        (["--xyzzy"], "mooncake_client: the flag --xyzzy is unknown; mooncake_client --help"),
        (["--global_segment_size=4XB"], "mooncake_client: argument --global_segment_size: expected a size in bytes"),
    ],
)
def test_mooncake_client(arguments, message, capsys):
    one_sentence(lambda: client.main(arguments), message, capsys)


def one_sentence(command, message, capsys):
    with pytest.raises(SystemExit) as caught:
        command()
    assert caught.value.code == 2
    text = capsys.readouterr().err
    assert text.startswith(message)
    assert text.count("\n") == 1


def test_two_packages_are_one_sentence_for_the_client_too(monkeypatch, capsys):
    def refuse():
        raise ImportError("both are installed")

    monkeypatch.setattr(client, "refuse_if_cpp_installed", refuse)
    assert client.main([]) == 1
    assert capsys.readouterr().err == "mooncake_client: both are installed\n"
