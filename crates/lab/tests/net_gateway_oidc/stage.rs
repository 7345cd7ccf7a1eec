//! A host that serves, an identity provider, and a machine with a client and a browser.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use serde_json::Value;
use weft_bench::comparison::install::LeftOut;
use weft_bench::sandbox::progress::note;
use weft_bench::sandbox::{Host, Netns, Running, SandboxError, require};
use weft_lab::go;
use weft_lab::net::Lab;
use weft_lab::net::gateway::{LIMIT, Machine};

/// Where browsers come back to.
pub(crate) const REDIRECT: &str = "https://198.51.1.1:9443/callback";
/// The client's secret at the provider.
const SECRET: &str = "s:e cret%";
/// How a client says that it shows pages.
pub(crate) const WEBAUTH: [&str; 3] = ["--setenv", "IV_SSO", "webauth"];
const ISSUER: &str = "https://198.51.1.2";
const PASSWORD: &str = "verysecure";
const USERS: [(&str, &[&str]); 3] =
    [("anna", &["staff", "vpn"]), ("berta", &["vpn"]), ("carl", &["staff"])];

pub(crate) struct Stage {
    lab: Lab,
    pub(crate) machine: Machine,
    provider: Running,
    folder: PathBuf,
}

impl Stage {
    /// `None`: the provider cannot be built here.
    pub(crate) fn new() -> anyhow::Result<Option<Self>> {
        let program = match go::provider() {
            Ok(programs) => programs.program("provider")?,
            Err(LeftOut(why)) => {
                note(&format!("not tested here: logins at an identity provider: {why}"));
                return Ok(None);
            }
        };
        for name in ["openvpn", "openssl", "curl"] {
            require(name, name)?;
        }
        let lab = Lab::launched(1, &[])?;
        let machine = Machine::new(&lab, 1)?;
        let folder = lab.sandbox.directory().to_owned();
        certificates(&folder)?;
        let provider = provider(&program, &folder, &machine.netns)?;
        write_secret(&folder)?;
        lab.host(0).weft(&["ca", "init"])?.success()?;
        Ok(Some(Self { lab, machine, provider, folder }))
    }

    pub(crate) fn host(&self) -> &Host {
        self.lab.host(0)
    }

    pub(crate) fn stop_provider(&mut self) {
        self.provider.kill();
    }

    /// The path of one of the files.
    pub(crate) fn path(&self, name: &str) -> String {
        self.folder.join(name).to_string_lossy().into_owned()
    }

    /// The words of a command that serves.
    fn words(&self, more: &[&str]) -> Vec<String> {
        let [secret, ca, certificate, key] =
            ["secret", "ca.pem", "1.pem", "1.key"].map(|name| self.path(name));
        let serve = ["openvpn", "serve", "--ping", "1", "--ping-restart", "6", "--auth", "oidc"];
        let mut words = serve.to_vec();
        words.extend(["--oidc-client-secret", &secret, "--oidc-redirect", REDIRECT]);
        words.extend(["--oidc-certificate", &certificate, "--oidc-key", &key]);
        let (client, ca) = ("--oidc-client-id", ca.as_str());
        for (option, value) in [("--oidc-issuer", ISSUER), (client, "weft"), ("--oidc-ca", ca)] {
            if !more.contains(&option) {
                words.extend([option, value]);
            }
        }
        words.extend(more);
        words.into_iter().map(str::to_owned).collect()
    }

    pub(crate) fn serve(&self, more: &[&str]) -> anyhow::Result<()> {
        let words = self.words(more);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let served = self.host().weft_json(&words)?;
        ensure!(served["state"] == "serving" && served["auth"] == "oidc", "{served}");
        Ok(())
    }

    /// What is said of a command that serves, which is refused.
    pub(crate) fn refusal(&self, more: &[&str]) -> anyhow::Result<String> {
        let words = self.words(more);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let output = self.host().weft(&words)?;
        ensure!(!output.status.success(), "{output:?}");
        Ok(output.stderr)
    }

    pub(crate) fn profile(&self, name: &str) -> anyhow::Result<PathBuf> {
        let text = self.host().weft(&["openvpn", "client", name])?.success()?.stdout;
        ensure!(!text.contains("auth-user-pass"), "{text}");
        let path = self.folder.join(format!("{name}.ovpn"));
        std::fs::write(&path, text)?;
        Ok(path)
    }

    /// The page that a client is told to open.
    pub(crate) fn page(&self, client: &mut Running, kind: &str) -> anyhow::Result<String> {
        let said = client.line_with(kind, LIMIT)?;
        let url = said.split(kind).nth(1).and_then(|rest| rest.split('\'').next());
        Ok(url.with_context(|| format!("no URL: {said}"))?.to_owned())
    }

    /// A browser of the machine's, without cookies.
    pub(crate) fn browser(&self, name: &str) -> Browser<'_> {
        self.browser_in(&self.machine.netns, name)
    }

    /// A browser elsewhere.
    pub(crate) fn browser_in<'a>(&self, netns: &'a Netns, name: &str) -> Browser<'a> {
        let cookies = self.path(&format!("{name}.cookies"));
        let _ = std::fs::remove_file(&cookies);
        Browser { netns, ca: self.path("ca.pem"), cookies }
    }

    /// The connected clients and their users.
    pub(crate) fn names(&self) -> anyhow::Result<Vec<(String, String)>> {
        let list = self.host().weft_json(&["status", "clients"])?;
        let clients = list.as_array().context("no list")?.iter();
        let text = |value: &Value| value.as_str().unwrap_or("-").to_owned();
        Ok(clients.map(|client| (text(&client["name"]), text(&client["user"]))).collect())
    }

    pub(crate) fn drops(&self, counter: &str) -> Result<u64, SandboxError> {
        let status = self.host().weft_json(&["status"])?;
        Ok(status["gateway"]["drops"][counter].as_u64().unwrap_or_default())
    }
}

/// curl with cookies.
pub(crate) struct Browser<'a> {
    netns: &'a Netns,
    ca: String,
    cookies: String,
}

/// What a browser shows.
pub(crate) struct Shown {
    pub(crate) status: u16,
    /// Where it is sent.
    pub(crate) leads_to: String,
    pub(crate) body: String,
}

impl Browser<'_> {
    /// Opens one page, and follows nothing.
    pub(crate) fn open(&self, url: &str) -> anyhow::Result<Shown> {
        self.ask(url, &[])
    }

    /// Sends a form.
    pub(crate) fn post(&self, url: &str, fields: &[(&str, &str)]) -> anyhow::Result<Shown> {
        let mut words = vec!["--data".to_owned(), String::new()];
        for (name, value) in fields {
            words.extend(["--data-urlencode".to_owned(), format!("{name}={value}")]);
        }
        self.ask(url, &words.iter().map(String::as_str).collect::<Vec<_>>())
    }

    fn ask(&self, url: &str, more: &[&str]) -> anyhow::Result<Shown> {
        let words = ["curl", "-sS", "-m", "30", "--cacert", &self.ca, "-b", &self.cookies];
        let told = ["-c", &self.cookies, "-w", "\n%{http_code} %{redirect_url}", url];
        let output = self.netns.exec(&[&words[..], &told, more].concat())?.success()?;
        let (body, told) = output.stdout.rsplit_once('\n').context("no status")?;
        let (status, leads_to) = told.split_once(' ').context("no status")?;
        Ok(Shown { status: status.parse()?, leads_to: leads_to.to_owned(), body: body.to_owned() })
    }

    /// The state with which a page sends the browser to the provider.
    pub(crate) fn state(&self, url: &str) -> anyhow::Result<String> {
        let shown = self.open(url)?;
        let mut parts = shown.leads_to.split(['?', '&']);
        let state = parts.find_map(|part| part.strip_prefix("state="));
        Ok(state.with_context(|| format!("no state: {}", shown.leads_to))?.to_owned())
    }

    /// Logs in at the provider; returns where that sends the browser.
    pub(crate) fn came_back(&self, url: &str, user: &str) -> anyhow::Result<String> {
        let mut shown = self.open(url)?;
        while !shown.leads_to.is_empty() {
            shown = self.open(&shown.leads_to)?;
        }
        let id = shown.body.split("name=\"id\" value=\"").nth(1);
        let id = id.and_then(|rest| rest.split('"').next());
        let id = id.with_context(|| format!("no form: {}", shown.body))?;
        let fields = [("id", id), ("username", user), ("password", PASSWORD)];
        let mut shown = self.post(&format!("{ISSUER}/login/username"), &fields)?;
        while !shown.leads_to.starts_with(REDIRECT) {
            ensure!(!shown.leads_to.is_empty(), "the provider keeps the browser: {}", shown.body);
            shown = self.open(&shown.leads_to)?;
        }
        Ok(shown.leads_to)
    }

    /// Logs in; returns the last page.
    pub(crate) fn log_in(&self, url: &str, user: &str) -> anyhow::Result<String> {
        Ok(self.open(&self.came_back(url, user)?)?.body)
    }
}

/// Starts the provider, and waits until it listens.
fn provider(program: &Path, folder: &Path, netns: &Netns) -> anyhow::Result<Running> {
    let users = USERS.map(|(name, _)| {
        let user = serde_json::json!({ "ID": name, "Username": name, "Password": PASSWORD });
        (name.to_owned(), user)
    });
    let groups = USERS.map(|(name, groups)| (name.to_owned(), serde_json::json!(groups)));
    let at = |name: &str| folder.join(name).to_string_lossy().into_owned();
    let [certificate, key, users_at, groups_at] = ["2.pem", "2.key", "users", "groups"].map(at);
    std::fs::write(&users_at, Value::from_iter(users).to_string())?;
    std::fs::write(&groups_at, Value::from_iter(groups).to_string())?;
    let program = program.to_string_lossy();
    let files = [certificate.as_str(), &key, &users_at, &groups_at];
    let place = [&*program, ISSUER, "198.51.1.2:443"];
    let mut provider = netns.spawn(&[&place[..], &files, &[REDIRECT, SECRET]].concat())?;
    provider.line_with("serving", LIMIT)?;
    Ok(provider)
}

fn write_secret(folder: &Path) -> anyhow::Result<()> {
    let path = folder.join("secret");
    std::fs::write(&path, format!("{SECRET}\n"))?;
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600))?;
    Ok(())
}

/// An authority, and certificates for the host (1) and the provider (2).
fn certificates(folder: &Path) -> anyhow::Result<()> {
    const SCRIPT: &str = "set -e
key() { openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes \"$@\"; }
key -x509 -keyout ca.key -out ca.pem -days 30 -subj /CN=lab
for n in 1 2; do
  key -keyout $n.key -out $n.csr -subj /CN=$n
  echo subjectAltName=IP:198.51.1.$n > $n.ext
  openssl x509 -req -in $n.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 30 -extfile $n.ext -out $n.pem
done";
    let made =
        std::process::Command::new("sh").args(["-c", SCRIPT]).current_dir(folder).output()?;
    ensure!(made.status.success(), "{made:?}");
    Ok(())
}
