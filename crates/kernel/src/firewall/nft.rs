//! nftables by way of the program `nft` and its JSON (libnftables-json(5)).
//!
//! All our rules are in tables of our own, identified by the chain [`TAG`] in them. Each change is one
//! transaction: the kernel applies all of it or nothing, with no moment in between.

use std::{
    io,
    process::{Output, Stdio},
    time::Duration,
};

use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    process::{Child, Command},
};
use weft_io::namespace::{self, Namespace};

use crate::{error::KernelError, handle::Kernel};

/// The empty chain that identifies a table as ours, also to people.
pub(crate) const TAG: &str = "made-by-weft";
/// How long one run of a firewall program may take, in milliseconds.
const RUN_TIMEOUT_MS: u64 = 30_000;
/// The most that such a program may print, in bytes. A host with thousands of services has a few
/// megabytes of rules.
const OUTPUT_MAX_BYTES: u64 = 32 << 20;
/// The directories of these programs, if `PATH` does not name them.
const SYSTEM_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A table, by address family and name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Table {
    pub(crate) family: &'static str,
    pub(crate) name: &'static str,
}

/// The contents of a table, as `nft` shows them: objects such as `{"rule": {...}}`.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Listing(pub(crate) Vec<Value>);

impl Kernel {
    /// Lists a table; `None` if there is no such table.
    pub(crate) async fn nft_list(&self, table: Table) -> Result<Option<Listing>, KernelError> {
        self.nft_list_with("-j", table).await
    }

    /// The same without the members of sets, where this `nft` can leave them out.
    pub(crate) async fn nft_list_without_members(
        &self,
        table: Table,
    ) -> Result<Option<Listing>, KernelError> {
        self.nft_list_with("-jt", table).await
    }

    async fn nft_list_with(
        &self,
        options: &str,
        table: Table,
    ) -> Result<Option<Listing>, KernelError> {
        let Table { family, name } = table;
        let doing = format!("list the nftables table {family} {name}");
        let output = self.run_nft(&[options, "list", "table", family, name], None, &doing).await?;
        let complaint = String::from_utf8_lossy(&output.stderr);
        if !output.status.success() {
            if complaint.contains("No such file or directory") {
                return Ok(None);
            }
            return Err(refused(doing, &complaint));
        }
        Listing::parse(&output.stdout, &doing).map(Some)
    }

    /// The chains of all tables.
    pub(crate) async fn nft_chains(&self) -> Result<Listing, KernelError> {
        self.nft_list_all("chains").await
    }

    /// All rules of all tables.
    pub(crate) async fn nft_ruleset(&self) -> Result<Listing, KernelError> {
        self.nft_list_all("ruleset").await
    }

    async fn nft_list_all(&self, what: &str) -> Result<Listing, KernelError> {
        let doing = &format!("list the {what} of nftables");
        let output = self.run_nft(&["-j", "list", what], None, doing).await?;
        if !output.status.success() {
            return Err(refused(doing.clone(), &String::from_utf8_lossy(&output.stderr)));
        }
        Listing::parse(&output.stdout, doing)
    }

    /// Carries out commands such as `{"add": {"table": {...}}}` in one transaction.
    pub(crate) async fn nft_apply(
        &self,
        commands: Vec<Value>,
        doing: &str,
    ) -> Result<(), KernelError> {
        let input = json!({ "nftables": commands }).to_string();
        self.count_change();
        let output = self.run_nft(&["-j", "-f", "-"], Some(input.as_bytes()), doing).await?;
        if output.status.success() {
            return Ok(());
        }
        Err(refused(doing.to_owned(), &String::from_utf8_lossy(&output.stderr)))
    }

    /// Carries out commands in nft's own language, in one transaction.
    pub(crate) async fn nft_write(&self, text: &str, doing: &str) -> Result<(), KernelError> {
        self.count_change();
        let output = self.run_nft(&["-f", "-"], Some(text.as_bytes()), doing).await?;
        if output.status.success() {
            return Ok(());
        }
        Err(refused(doing.to_owned(), &String::from_utf8_lossy(&output.stderr)))
    }

    /// Deletes a table of ours. False if there was none.
    pub(crate) async fn nft_remove(&self, table: Table) -> Result<bool, KernelError> {
        let Some(listing) = self.nft_list(table).await? else { return Ok(false) };
        if !listing.is_ours() {
            return Err(table.taken());
        }
        let doing = format!("remove the nftables table {} {}", table.family, table.name);
        self.nft_apply(vec![json!({ "delete": table.object() })], &doing).await.map(|()| true)
    }

    async fn run_nft(
        &self,
        arguments: &[&str],
        input: Option<&[u8]>,
        doing: &str,
    ) -> Result<Output, KernelError> {
        let missing = || KernelError::NftMissing { doing: doing.to_owned() };
        run_program(&self.inner.home, "nft", arguments, input, doing).await?.ok_or_else(missing)
    }
}

impl Table {
    pub(crate) fn object(self) -> Value {
        json!({ "table": { "family": self.family, "name": self.name } })
    }

    /// An object in this table: `fields` and its place.
    pub(crate) fn part(self, kind: &str, mut fields: Value) -> Value {
        fields["family"] = self.family.into();
        fields["table"] = self.name.into();
        json!({ kind: fields })
    }

    /// The chain that identifies the table as ours.
    pub(crate) fn tag(self) -> Value {
        self.part("chain", json!({ "name": TAG }))
    }

    /// Makes the table hold exactly `objects`, and drops its previous contents.
    pub(crate) fn replacement(self, objects: &[Value]) -> Vec<Value> {
        let table = self.object();
        let fresh = [json!({ "add": table }), json!({ "delete": table }), json!({ "add": table })];
        fresh.into_iter().chain(objects.iter().map(|object| json!({ "add": object }))).collect()
    }

    pub(crate) fn taken(self) -> KernelError {
        KernelError::TableTaken { family: self.family.into(), name: self.name.into() }
    }
}

impl Listing {
    fn parse(text: &[u8], doing: &str) -> Result<Self, KernelError> {
        let refused = |why: &str| refused(doing.to_owned(), why);
        let shown: Value = serde_json::from_slice(text)
            .map_err(|error| refused(&format!("its answer is not JSON: {error}")))?;
        let Some(Value::Array(objects)) = shown.get("nftables") else {
            return Err(refused("its answer has no list of objects"));
        };
        let is_object = |object: &&Value| object.get("metainfo").is_none();
        Ok(Self(objects.iter().filter(is_object).cloned().collect()))
    }

    /// Whether Weft made the table.
    pub(crate) fn is_ours(&self) -> bool {
        self.of("chain").any(|chain| chain["name"] == TAG)
    }

    /// The objects of one kind.
    pub(crate) fn of<'a>(&'a self, kind: &'a str) -> impl Iterator<Item = &'a Value> {
        self.0.iter().filter_map(move |object| object.get(kind))
    }

    /// The same without parts that differ between hosts or over time: handles, counts, the members of sets,
    /// and the order of unordered lists.
    pub(crate) fn shape(&self) -> Vec<Value> {
        let is_table = |object: &&Value| object.get("table").is_some();
        let mut parts: Vec<Value> =
            self.0.iter().filter(|object| !is_table(object)).cloned().collect();
        for part in &mut parts {
            for (kind, fields) in part.as_object_mut().into_iter().flatten() {
                let Some(fields) = fields.as_object_mut() else { continue };
                fields.remove("handle");
                if kind == "counter" {
                    fields.remove("packets");
                    fields.remove("bytes");
                }
                if kind == "set" || kind == "map" {
                    fields.remove("elem");
                }
            }
        }
        // Stable: rules keep their order.
        parts.sort_by_key(|part| match part.get("rule") {
            Some(rule) => format!("rule {}", rule["chain"]),
            None => part.to_string(),
        });
        parts
    }
}

/// Runs a firewall program in a network namespace, with a time limit and without a shell. `None`
/// if it is not installed.
pub(crate) async fn run_program(
    home: &Namespace,
    program: &str,
    arguments: &[&str],
    input: Option<&[u8]>,
    doing: &str,
) -> Result<Option<Output>, KernelError> {
    let failed =
        |source| KernelError::Program { program: program.into(), doing: doing.into(), source };
    let child = match start(home, program, arguments) {
        Ok(child) => child,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    let limit = Duration::from_millis(RUN_TIMEOUT_MS);
    match tokio::time::timeout(limit, converse(child, input)).await {
        Ok(result) => result.map(Some).map_err(failed),
        Err(_) => {
            let source = io::Error::new(
                io::ErrorKind::TimedOut,
                format!("not done after {RUN_TIMEOUT_MS} ms"),
            );
            Err(failed(source))
        }
    }
}

fn start(home: &Namespace, program: &str, arguments: &[&str]) -> io::Result<Child> {
    let path = std::env::var("PATH").unwrap_or_default();
    let path = if path.is_empty() { SYSTEM_PATH.into() } else { format!("{path}:{SYSTEM_PATH}") };
    let mut command = Command::new(program);
    command
        .args(arguments)
        .env_clear()
        .env("PATH", path)
        .env("LC_ALL", "C")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    let runtime = tokio::runtime::Handle::current();
    namespace::run_in(home, || {
        let _guard = runtime.enter();
        command.spawn()
    })?
}

/// Writes and reads at once, so that neither side waits for the other.
async fn converse(mut child: Child, input: Option<&[u8]>) -> io::Result<Output> {
    let mut stdin = child.stdin.take();
    let write = async {
        // A program that ends without reading its input gives the reason on its other end.
        if let (Some(stdin), Some(input)) = (&mut stdin, input) {
            let _ = stdin.write_all(input).await;
        }
        drop(stdin);
    };
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    let (out, err) = (child.stdout.take(), child.stderr.take());
    let read_out = async {
        match out {
            Some(pipe) => pipe.take(OUTPUT_MAX_BYTES).read_to_end(&mut stdout).await.map(|_| ()),
            None => Ok(()),
        }
    };
    let read_err = async {
        match err {
            Some(pipe) => pipe.take(OUTPUT_MAX_BYTES).read_to_end(&mut stderr).await.map(|_| ()),
            None => Ok(()),
        }
    };
    let ((), out, err) = tokio::join!(write, read_out, read_err);
    out.and(err)?;
    let status = child.wait().await?;
    Ok(Output { status, stdout, stderr })
}

fn refused(doing: String, complaint: &str) -> KernelError {
    if complaint.contains("Operation not permitted") {
        return KernelError::NotPermitted { doing };
    }
    let reason = complaint.lines().map(str::trim).find(|line| !line.is_empty());
    KernelError::NftRefused { doing, reason: reason.unwrap_or("no reason given").to_owned() }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn home() -> Namespace {
        Namespace::current().unwrap()
    }

    #[tokio::test]
    async fn a_program_that_is_not_there_is_none() {
        let found = run_program(&home(), "no-such-program", &[], None, "look").await.unwrap();
        assert!(found.is_none());
    }

    #[tokio::test]
    async fn input_and_output_may_be_large_and_unread() {
        let input = vec![b'x'; 1 << 20];
        let output = run_program(&home(), "cat", &[], Some(&input), "copy").await.unwrap().unwrap();
        assert_eq!(output.stdout, input);
        let output = run_program(&home(), "true", &[], Some(&input), "ignore").await.unwrap();
        assert!(output.unwrap().status.success());
    }

    #[tokio::test(start_paused = true)]
    async fn a_program_that_hangs_is_ended() {
        let error = run_program(&home(), "sleep", &["1000"], None, "wait").await.unwrap_err();
        let text = error.to_string();
        assert!(text.contains("sleep") && text.contains("30000 ms"), "{text}");
    }

    #[test]
    fn the_shape_leaves_out_what_changes_by_itself() {
        let listing = |handle: u32, packets: u32, elem: Value| {
            Listing(vec![
                json!({ "table": { "family": "inet", "name": "t", "handle": handle } }),
                json!({ "counter": { "name": "c", "handle": handle, "packets": packets, "bytes": 1 } }),
                json!({ "set": { "name": "s", "type": "ipv4_addr", "elem": elem } }),
                json!({ "rule": { "chain": "b", "handle": handle, "expr": [1] } }),
                json!({ "rule": { "chain": "b", "handle": handle, "expr": [0] } }),
            ])
        };
        let first = listing(1, 7, json!(["10.0.0.1"]));
        let mut second = listing(2, 9, json!([]));
        assert_eq!(first.shape(), second.shape());
        second.0.swap(1, 2);
        assert_eq!(first.shape(), second.shape());
        second.0.swap(3, 4);
        assert_ne!(first.shape(), second.shape(), "rules have an order");
    }
}
