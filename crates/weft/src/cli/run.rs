//! `weft run`: a command in a new network namespace on the network.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;

use super::args::RunArgs;
use crate::api::{AttachRequest, Attachment, Client};

/// Moves this process into a new network namespace, has the daemon attach it, then becomes the command.
///
/// The namespace lives as long as the command and its children; the daemon takes its addresses back
/// when it is gone.
pub(super) fn run(args: RunArgs, runtime_dir: &Path) -> anyhow::Result<ExitCode> {
    let Some((program, arguments)) = args.command.split_first() else {
        anyhow::bail!("name a command after --");
    };
    weft_io::namespace::unshare_network()
        .context("cannot make a network namespace; run this command as root")?;
    let request = AttachRequest {
        container: format!("pid:{}", std::process::id()),
        addresses: args.addresses,
        name: Some(format!("run:{program}")),
        no_multicast_route: false,
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let _: Attachment = runtime.block_on(async {
        weft_kernel::Kernel::new()?.set_loopback_up().await?;
        anyhow::Ok(Client::new(runtime_dir).post("/v1/attach", &request).await?)
    })?;
    drop(runtime);
    let error = std::process::Command::new(program).args(arguments).exec();
    Err(error).with_context(|| format!("cannot run {program}"))
}
