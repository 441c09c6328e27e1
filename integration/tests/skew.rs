//! Programs of other versions: named in words, and the commands run here.

use std::net::SocketAddr;

use nix::sched::{CloneFlags, setns};
use posh_integration::host::CONFIG;
use posh_integration::oracle::{SCRIPT_LIMIT, Under, collect};
use posh_integration::services::write_file;
use posh_integration::{Lab, LabSpec, Script};
use posh_proto::PROTOCOL_VERSION;
use posh_proto::executor::executor_server::{Executor, ExecutorServer};
use posh_proto::executor::{
    DescribeReply, DescribeRequest, FingerprintReply, FingerprintRequest, RunInput, RunOutput,
    StatusReply, StatusRequest, ToolsReply, ToolsRequest,
};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status, Streaming};

use crate::programs;

/// An executor of another version, which knows no more than that.
struct Other(u32);

#[tonic::async_trait]
impl Executor for Other {
    type RunStream = tokio_stream::Empty<Result<RunOutput, Status>>;

    async fn describe(
        &self,
        _: Request<DescribeRequest>,
    ) -> Result<Response<DescribeReply>, Status> {
        let version = "9.9.9".to_owned();
        Ok(Response::new(DescribeReply { protocol: self.0, version, ..DescribeReply::default() }))
    }

    async fn tools(&self, _: Request<ToolsRequest>) -> Result<Response<ToolsReply>, Status> {
        Err(Status::unimplemented("of another version"))
    }

    async fn fingerprint(
        &self,
        _: Request<FingerprintRequest>,
    ) -> Result<Response<FingerprintReply>, Status> {
        Err(Status::unimplemented("of another version"))
    }

    async fn status(&self, _: Request<StatusRequest>) -> Result<Response<StatusReply>, Status> {
        Err(Status::unimplemented("of another version"))
    }

    async fn run(
        &self,
        _: Request<Streaming<RunInput>>,
    ) -> Result<Response<Self::RunStream>, Status> {
        Err(Status::unimplemented("of another version"))
    }
}

/// Serves until the answer is dropped; the address is one of the host with this process 1.
fn serve(other: Other, init: u32, address: SocketAddr) -> tokio::runtime::Runtime {
    let space = std::fs::File::open(format!("/proc/{init}/ns/net")).unwrap();
    std::thread::spawn(move || {
        setns(space, CloneFlags::CLONE_NEWNET).unwrap();
        let listener = std::net::TcpListener::bind(address).unwrap();
        listener.set_nonblocking(true).unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        runtime.spawn(async move {
            let incoming =
                TcpListenerStream::new(tokio::net::TcpListener::from_std(listener).unwrap());
            Server::builder()
                .add_service(ExecutorServer::new(other))
                .serve_with_incoming(incoming)
                .await
                .unwrap();
        });
        runtime
    })
    .join()
    .unwrap()
}

#[test]
fn executors_of_other_versions() {
    for (theirs, older) in
        [(PROTOCOL_VERSION - 1, "its posh-executor 9.9.9"), (PROTOCOL_VERSION + 1, "this gateway")]
    {
        let lab = Lab::start(&LabSpec::servers(1).without_executors(), &programs()).unwrap();
        std::fs::write(lab.data(1).join("f"), "content\n").unwrap();
        let address: SocketAddr = "127.0.0.1:7600".parse().unwrap();
        let _server = serve(Other(theirs), lab.workstation.pid(), address);
        let table = lab.mount_table().replace("10.77.1.2:7400", &address.to_string());
        write_file(&lab.workstation, CONFIG, table.as_bytes()).unwrap();
        let outcome =
            Script::new("cat /mnt/s1/f").run(&lab.workstation, Under::PoshExplained).unwrap();
        assert_eq!(outcome.stdout, b"content\n", "{outcome}");
        let stage = &outcome.report().pipelines[0].stages[0];
        let words =
            format!("speaks protocol {theirs}, this gateway {PROTOCOL_VERSION}: update {older}");
        assert!(!stage.is_offloaded() && stage.reason.contains(&words), "{stage:?}");
        let mut doctor = lab.workstation.command(lab.workstation.programs().join("posh"));
        doctor.arg("doctor");
        let doctor = collect(&lab.workstation, doctor, "posh doctor", SCRIPT_LIMIT).unwrap();
        let said = String::from_utf8_lossy(&doctor.stdout).into_owned();
        let words = words.replace("this gateway", "this posh");
        let line = said
            .lines()
            .find(|line| line.contains("executor") && line.contains(&words))
            .unwrap_or_default();
        assert!(
            line.starts_with("BAD ") && line.contains("until then everything runs here"),
            "{words}: {said}"
        );
    }
}
