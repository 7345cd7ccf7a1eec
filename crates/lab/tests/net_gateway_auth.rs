//! Users log in to the gateway with passwords, codes and tokens, judged by Debian's `openvpn`.

use std::net::Ipv4Addr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde_json::Value;
use weft_bench::sandbox::{Host, Netns, Running, require, try_wait_until};
use weft_lab::net::Lab;
use weft_lab::net::gateway::totp_code as code;

const LIMIT: Duration = Duration::from_secs(30);
const CONNECTED: &str = "Initialization Sequence Completed";
const PASSWORD: &str = "correct horse";
const FAILED: &str = "AUTH_FAILED,Wrong user name or password";

/// A host that serves, and a machine that reaches it from outside.
struct Stage {
    lab: Lab,
    machine: Netns,
}

/// How a client shows its password.
struct Login<'a> {
    user: &'a str,
    password: &'a str,
    /// Further words for `openvpn`.
    words: &'a [&'a str],
}

impl Stage {
    fn new(serve: &[&str]) -> anyhow::Result<Self> {
        require("openvpn", "openvpn")?;
        let lab = Lab::launched(1, &[])?;
        let machine = lab.sandbox.add_netns("m1")?;
        let (host, name) = (lab.host(0), machine.name().to_owned());
        host.netns().ip(&format!("link add m1 type veth peer name wan netns {name}"))?;
        for (netns, device, last) in [(host.netns(), "m1", 1), (&machine, "wan", 2)] {
            netns.ip(&format!("addr add 198.51.1.{last}/24 dev {device}"))?;
            netns.ip(&format!("link set {device} up"))?;
        }
        host.weft(&["ca", "init"])?.success()?;
        let stage = Self { lab, machine };
        stage.serve(serve)?;
        Ok(stage)
    }

    fn host(&self) -> &Host {
        self.lab.host(0)
    }

    fn serve(&self, words: &[&str]) -> anyhow::Result<Value> {
        let always = ["openvpn", "serve", "--ping", "1", "--ping-restart", "6"];
        Ok(self.host().weft_json(&[&always[..], words].concat())?)
    }

    /// Adds a user; the answer has the secret of codes, if there are to be codes.
    fn add(&self, user: &str, words: &[&str]) -> anyhow::Result<Value> {
        let words = [&["openvpn", "user", "add", user, "--json"][..], words].concat();
        let added = self.host().weft_with_input(&words, &format!("{PASSWORD}\n"))?;
        Ok(added.success()?.json()?)
    }

    /// A new profile, in a file.
    fn profile(&self, words: &[&str]) -> anyhow::Result<PathBuf> {
        let words = [&["openvpn", "client"][..], words].concat();
        let text = self.host().weft(&words)?.success()?.stdout;
        let name = words.join("-").replace('/', "-");
        self.file(&format!("{name}.ovpn"), &text)
    }

    fn file(&self, name: &str, text: &str) -> anyhow::Result<PathBuf> {
        let path = self.lab.sandbox.directory().join(name);
        std::fs::write(&path, text)?;
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o700))?;
        Ok(path)
    }

    /// Starts a client whose password stands in a file.
    fn start(&self, profile: &Path, login: &Login<'_>) -> anyhow::Result<Running> {
        let Login { user, password, words } = login;
        let file = self.file(&format!("{user}.login"), &format!("{user}\n{password}\n"))?;
        let (file, profile) = (file.to_string_lossy(), profile.to_string_lossy());
        let place = ["openvpn", "--remote", "198.51.1.1", "1194", "udp", "--verb", "4"];
        let config = ["--config", &profile, "--dev", "tun0", "--auth-user-pass", &file];
        Ok(self.machine.spawn(&[&place[..], &config, words].concat())?)
    }

    fn connect(&self, profile: &Path, login: &Login<'_>) -> anyhow::Result<(Running, String)> {
        let mut client = self.start(profile, login)?;
        let pushed = client.line_with("PUSH_REPLY", LIMIT)?;
        client.line_with(CONNECTED, LIMIT)?;
        Ok((client, pushed))
    }

    /// Waits until a refused client has said so, and has ended by itself.
    fn refused(&self, profile: &Path, login: &Login<'_>, text: &str) -> anyhow::Result<()> {
        let mut client = self.start(profile, login)?;
        client.line_with(text, LIMIT)?;
        client.wait(LIMIT)?;
        Ok(())
    }

    /// The gateway answers by the tunnel.
    fn wait_ping(&self, pushed: &str) -> anyhow::Result<()> {
        let gateway = value(pushed, "route-gateway ")?;
        let gateway: Ipv4Addr = gateway.parse()?;
        try_wait_until("an answer from the gateway to a client", LIMIT, || {
            let words = ["ping", "-n", "-c", "1", "-W", "1", &gateway.to_string()];
            Ok(self.machine.exec(&words)?.status.success())
        })?;
        Ok(())
    }

    fn names(&self) -> anyhow::Result<Vec<(String, String)>> {
        let list = self.host().weft_json(&["status", "clients"])?;
        let clients = list.as_array().context("no list")?.iter();
        let text = |value: &Value| value.as_str().unwrap_or("-").to_owned();
        Ok(clients.map(|client| (text(&client["name"]), text(&client["user"]))).collect())
    }

    fn drops(&self, counter: &str) -> anyhow::Result<u64> {
        let status = self.host().weft_json(&["status"])?;
        Ok(status["gateway"]["drops"][counter].as_u64().unwrap_or_default())
    }
}

fn login<'a>(user: &'a str, password: &'a str) -> Login<'a> {
    Login { user, password, words: &[] }
}

/// The value of a pushed option.
fn value(pushed: &str, name: &str) -> anyhow::Result<String> {
    let found = pushed.split([',', '\'']).find_map(|option| option.strip_prefix(name));
    let word = found.and_then(|rest| rest.split_whitespace().next());
    word.map(str::to_owned).with_context(|| format!("{name}: {pushed}"))
}

#[test]
fn a_user_logs_in_once_and_is_out_within_a_second_of_being_removed() -> anyhow::Result<()> {
    let stage = Stage::new(&["--auth", "password"])?;
    let host = stage.host();
    let short = host.weft_with_input(&["openvpn", "user", "add", "anna"], "short\n")?;
    ensure!(short.status.code() == Some(2) && short.stderr.contains("8 characters"), "{short:?}");
    stage.add("anna", &[])?;
    let again = host.weft_with_input(&["openvpn", "user", "add", "anna"], PASSWORD)?;
    ensure!(again.status.code() == Some(5), "{again:?}");
    let profile = stage.profile(&["--shared"])?;
    stage.refused(&profile, &login("anna", "wrong horse"), FAILED)?;
    stage.refused(&profile, &login("nobody", PASSWORD), FAILED)?;
    ensure!(stage.drops("login_refused")? == 2);
    // The client renews its key: with a token, since its file has another password by then.
    let words = ["--reneg-sec", "5", "--auth-nocache"];
    let anna = Login { words: &words, ..login("anna", PASSWORD) };
    let (mut client, pushed) = stage.connect(&profile, &anna)?;
    ensure!(pushed.contains("auth-token"), "no token: {pushed}");
    stage.wait_ping(&pushed)?;
    ensure!(stage.names()? == [("anna".into(), "anna".into())], "{:?}", stage.names()?);
    stage.file("anna.login", "anna\nwrong horse\n")?;
    for _ in 0..2 {
        client.line_with("Control Channel: TLS", LIMIT)?;
    }
    // It connects again, also to a daemon that was killed.
    host.kill_daemon();
    host.start_daemon(&[])?;
    let pushed = client.line_with("PUSH_REPLY,topology", LIMIT * 2)?;
    client.line_with(CONNECTED, LIMIT)?;
    stage.wait_ping(&pushed)?;
    let removed = host.weft_json(&["openvpn", "user", "rm", "anna"])?;
    ensure!(removed["was_connected"] == true, "{removed}");
    let gateway = value(&pushed, "route-gateway ")?;
    let ping = stage.machine.exec(&["ping", "-n", "-c", "1", "-W", "1", &gateway])?;
    ensure!(!ping.status.success(), "a removed user still reaches the network");
    ensure!(stage.names()?.is_empty(), "a removed user is listed");
    client.line_with("user removed", Duration::from_secs(5))?;
    client.wait(LIMIT)?;
    stage.refused(&profile, &login("anna", PASSWORD), FAILED)?;
    let unknown = host.weft(&["openvpn", "user", "rm", "anna"])?;
    ensure!(unknown.status.code() == Some(4), "{unknown:?}");
    Ok(())
}

#[test]
fn a_token_is_renewed_with_each_key() -> anyhow::Result<()> {
    // A token is good for 12 s, and the password is gone by then.
    let stage = Stage::new(&["--auth", "password", "--token-renewal", "6"])?;
    stage.add("anna@example.com", &[])?;
    let profile = stage.profile(&["--shared"])?;
    let words = ["--reneg-sec", "5", "--auth-nocache"];
    let anna = Login { words: &words, ..login("anna@example.com", PASSWORD) };
    let (mut client, pushed) = stage.connect(&profile, &anna)?;
    stage.file("anna@example.com.login", "anna@example.com\nwrong horse\n")?;
    let connected = Instant::now();
    while connected.elapsed() < Duration::from_secs(20) {
        client.line_with("PUSH_REPLY,auth-token", LIMIT)?;
    }
    stage.wait_ping(&pushed)?;
    let names = stage.names()?;
    ensure!(names == [("anna@example.com".into(), "anna@example.com".into())], "{names:?}");
    let clients = stage.host().weft_json(&["status", "clients"])?;
    ensure!(clients[0]["dns_name"].is_null(), "{clients}");
    // It is the same session: a token that was refused would have made it a new one.
    let begun = clients[0]["since"].as_str().context("no time")?.to_owned();
    let last = clients[0]["last_handshake"].as_str().context("no time")?;
    ensure!(*begun < *last && stage.drops("login_token_refused")? == 0, "{clients}");
    Ok(())
}

#[test]
fn a_token_is_renewed_between_keys() -> anyhow::Result<()> {
    // A token is good for 4 s, keys are renewed after 10 s, and the password is gone by then.
    let stage = Stage::new(&["--auth", "password", "--token-renewal", "2"])?;
    stage.add("anna", &[])?;
    let profile = stage.profile(&["--shared"])?;
    let words = ["--reneg-sec", "10", "--auth-nocache"];
    let anna = Login { words: &words, ..login("anna", PASSWORD) };
    let (mut client, pushed) = stage.connect(&profile, &anna)?;
    stage.file("anna.login", "anna\nwrong horse\n")?;
    client.line_with("PUSH_REPLY,auth-token", LIMIT)?;
    client.line_with("Control Channel: TLS", LIMIT)?;
    client.line_with("PUSH_REPLY,auth-token", LIMIT)?;
    stage.wait_ping(&pushed)?;
    ensure!(stage.drops("login_token_refused")? == 0, "a token was too old for a key");
    Ok(())
}

#[test]
fn certificates_and_passwords_go_together_and_a_new_password_ends_sessions() -> anyhow::Result<()> {
    let stage = Stage::new(&["--auth", "both"])?;
    let host = stage.host();
    let shared = host.weft(&["openvpn", "client", "--shared"])?;
    ensure!(shared.status.code() == Some(5) && shared.stderr.contains("certificate"), "{shared:?}");
    for user in ["anna", "berta"] {
        stage.add(user, &[])?;
    }
    let profile = stage.profile(&["anna"])?;
    let text = std::fs::read_to_string(&profile)?;
    ensure!(text.contains("\nauth-user-pass\n"), "{text}");
    let other = "AUTH_FAILED,The certificate is another user's";
    stage.refused(&profile, &login("berta", PASSWORD), other)?;
    stage.refused(&profile, &login("anna", "wrong horse"), FAILED)?;
    let (mut client, pushed) = stage.connect(&profile, &login("anna", PASSWORD))?;
    stage.wait_ping(&pushed)?;
    // The session ends; what is in the client's file is the old password.
    let words = ["openvpn", "user", "passwd", "anna", "--json"];
    let changed: Value = host.weft_with_input(&words, "battery staple\n")?.success()?.json()?;
    ensure!(changed["was_connected"] == true, "{changed}");
    client.line_with(FAILED, LIMIT)?;
    client.wait(LIMIT)?;
    let (mut client, _) = stage.connect(&profile, &login("anna", "battery staple"))?;
    host.weft(&["openvpn", "revoke", "anna"])?.success()?;
    client.wait(LIMIT)?;
    let revoked = "AUTH_FAILED,The certificate is revoked";
    stage.refused(&profile, &login("anna", "battery staple"), revoked)?;

    // As OpenVPN without and with username-as-common-name.
    let profile = stage.profile(&["laptop"])?;
    for (which, name) in [("certificate", "laptop"), ("user", "berta")] {
        stage.serve(&["--auth", "both", "--client-name", which])?;
        let (mut client, _) = stage.connect(&profile, &login("berta", PASSWORD))?;
        ensure!(stage.names()? == [(name.into(), "berta".into())], "{:?}", stage.names()?);
        client.terminate(LIMIT)?;
    }
    Ok(())
}

/// A user interface of OpenVPN's: it answers what the client asks by its management socket.
fn answer(socket: &Path, user: &str, code: &str) -> anyhow::Result<String> {
    const SCRIPT: &str = r#"
import base64, socket, sys, time
path, user, password, code = sys.argv[1:]
for _ in range(300):
    try:
        s = socket.socket(socket.AF_UNIX)
        s.connect(path)
        break
    except OSError:
        time.sleep(0.1)
f = s.makefile('r')
def say(line):
    s.sendall((line + '\n').encode())
b64 = lambda text: base64.b64encode(text.encode()).decode()
for line in f:
    line = line.strip()
    if line.startswith('>PASSWORD:Need'):
        say('username "Auth" "%s"' % user)
        if 'SC:' in line:
            say('password "Auth" "SCRV1:%s:%s"' % (b64(password), b64(code)))
        else:
            say('password "Auth" "%s"' % password)
        print('asked: ' + line, flush=True)
    elif line.startswith('>INFOMSG:CR_TEXT'):
        print('asked: ' + line, flush=True)
        say('cr-response "%s"' % b64(code))
    elif line.startswith('>HOLD'):
        say('hold release')
    elif line.startswith('>STATE') and 'CONNECTED,SUCCESS' in line or 'Verification Failed' in line:
        print(line, flush=True)
        break
    elif line.startswith('>INFO:'):
        say('state on')
"#;
    let socket = socket.to_string_lossy();
    let words = ["-c", SCRIPT, &socket, user, PASSWORD, code];
    let output =
        std::process::Command::new("timeout").arg("60").arg("python3").args(words).output()?;
    ensure!(output.status.success(), "{output:?}");
    Ok(String::from_utf8(output.stdout)?)
}

#[test]
fn codes_are_asked_for_in_three_ways_and_taken_once() -> anyhow::Result<()> {
    require("python3", "python3")?;
    let stage = Stage::new(&["--auth", "password"])?;
    let otpauth = |name: &str| -> anyhow::Result<String> {
        let added = stage.add(name, &["--totp"])?;
        Ok(added["otpauth"].as_str().context("no secret")?.to_owned())
    };
    let start =
        |profile: &Path, name: &str, words: &[&str]| -> anyhow::Result<(Running, PathBuf)> {
            let socket = stage.lab.sandbox.directory().join(format!("{name}.sock"));
            let profile = profile.to_string_lossy();
            let shown = socket.to_string_lossy();
            let place = ["openvpn", "--config", &profile, "--dev", "tun0", "--verb", "4"];
            let remote = ["--remote", "198.51.1.1", "1194", "udp", "--auth-retry", "interact"];
            let managed = ["--management", &shown, "unix", "--management-query-passwords"];
            let hold = ["--management-hold"];
            let client =
                stage.machine.spawn(&[&place[..], &remote, &managed, &hold, words].concat())?;
            Ok((client, socket))
        };
    // The profile asks, and the code travels with the password.
    let anna = otpauth("anna")?;
    let profile = stage.profile(&["--shared", "--totp"])?;
    let text = std::fs::read_to_string(&profile)?;
    ensure!(text.contains("static-challenge"), "{text}");
    let right = code(&anna)?;
    let (mut client, socket) = start(&profile, "one", &[])?;
    let said = answer(&socket, "anna", &right)?;
    ensure!(said.contains("SC:1,One-time code:") && said.contains("SUCCESS"), "{said}");
    client.terminate(LIMIT)?;
    let (mut client, socket) = start(&profile, "again", &[])?;
    let said = answer(&socket, "anna", &right)?;
    ensure!(said.contains("Verification Failed"), "a code is taken twice: {said}");
    client.terminate(LIMIT)?;
    // The server asks, in the middle of the session.
    let berta = otpauth("berta")?;
    let profile = stage.profile(&["--shared"])?;
    let able = ["--push-peer-info", "--setenv", "IV_SSO", "crtext"];
    let (mut client, socket) = start(&profile, "two", &able)?;
    let said = answer(&socket, "berta", &code(&berta)?)?;
    ensure!(said.contains("CR_TEXT:R,E:One-time code:") && said.contains("SUCCESS"), "{said}");
    client.terminate(LIMIT)?;
    // A client that does neither is told to come with the code.
    let added = otpauth("carla")?;
    let mut client = stage.start(&profile, &login("carla", PASSWORD))?;
    let asked = client.line_with("AUTH_FAILED,CRV1:R,E:", LIMIT)?;
    let mark = asked.split("CRV1:R,E:").nth(1).and_then(|rest| rest.split(':').next());
    let mark = mark.with_context(|| format!("no mark: {asked}"))?;
    let answer = format!("CRV1::{mark}::{}", code(&added)?);
    stage.connect(&profile, &login("carla", &answer))?;
    Ok(())
}

#[test]
fn a_program_judges_passwords_and_says_why_not() -> anyhow::Result<()> {
    let stage = Stage::new(&["--auth", "certificate"])?;
    let script = "#!/bin/sh
{ read -r user; read -r password; } < \"$1\"
echo \"$1 $user $common_name $untrusted_ip\" >> \"${0%/*}/run/asked\"
case \"$user $password\" in
'anna right') exit 0 ;;
'berta right') echo 'Your account has expired' > \"$auth_failed_reason_file\"; exit 1 ;;
broken*) exit 7 ;;
esac
exit 1
";
    let program = stage.file("judge", script)?;
    let path = program.to_string_lossy().into_owned();
    let words = ["openvpn", "serve", "--auth", "both", "--auth-program"];
    let missing = stage.host().weft(&[&words[..], &["/nonexistent"]].concat())?;
    ensure!(missing.status.code() == Some(2), "{missing:?}");
    // What the daemon may write to is in its own directories alone.
    let script = script.replace("${0%/*}/run", &stage.host().runtime_directory().to_string_lossy());
    std::fs::write(&program, script)?;
    stage.serve(&["--auth", "both", "--client-name", "user", "--auth-program", &path])?;
    let profile = stage.profile(&["laptop"])?;
    stage.refused(&profile, &login("berta", "right"), "AUTH_FAILED,Your account has expired")?;
    stage.refused(&profile, &login("nobody", "right"), FAILED)?;
    let (mut client, pushed) = stage.connect(&profile, &login("anna", "right"))?;
    stage.wait_ping(&pushed)?;
    ensure!(stage.names()? == [("anna".into(), "anna".into())], "{:?}", stage.names()?);
    client.terminate(LIMIT)?;
    let asked = std::fs::read_to_string(stage.host().runtime_directory().join("asked"))?;
    let last = asked.lines().last().unwrap_or_default();
    ensure!(last.ends_with(" anna laptop 198.51.1.2"), "{asked}");
    for line in asked.lines() {
        let file = line.split(' ').next().unwrap_or_default();
        ensure!(!Path::new(file).exists(), "{file} is left");
    }
    // A program that fails is not the user's fault: the client is to come again.
    let mut client = stage.start(&profile, &login("broken", "x"))?;
    client.line_with("AUTH_FAILED,TEMP", LIMIT)?;
    client.terminate(LIMIT)?;
    ensure!(stage.host().log().contains("ended with exit status: 7"), "no warning");
    Ok(())
}

#[test]
fn guesses_are_held_up_and_a_good_user_is_not_for_long() -> anyhow::Result<()> {
    let stage = Stage::new(&["--auth", "password"])?;
    stage.add("anna", &[])?;
    let profile = stage.profile(&["--shared"])?;
    let mut guesses = 0;
    loop {
        let mut client = stage.start(&profile, &login("anna", "wrong horse"))?;
        let said = client.line_with("AUTH_FAILED", LIMIT)?;
        if said.contains("AUTH_FAILED,TEMP[backoff ") {
            ensure!(said.contains("Too many failed logins"), "{said}");
            client.terminate(LIMIT)?;
            break;
        }
        client.wait(LIMIT)?;
        guesses += 1;
        ensure!(guesses < 50, "guesses are not held up");
    }
    ensure!(guesses >= 10 && stage.drops("login_limited")? > 0, "{guesses} guesses");
    // She waits as long as her client is told to, and gets in.
    let mut client = stage.start(&profile, &login("anna", PASSWORD))?;
    client.line_with(CONNECTED, LIMIT * 4)?;
    Ok(())
}
